"""The host's own Policy with its DTensor configuration, over workers of ours: the steps of the
Megatron worker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.real import host
from tests.hosts.real.test_policy import WIDTH, Reference, inputs_of, rows

TOLERANCE = 1e-5
"""Of losses and gradient norms relative, of log-probabilities absolute, in fp32."""
CELLS = {
    "plain": ("plain", {}),
    "dynamic": ("dynamic", {}),
    "packed": ("packed", {}),
    "packed, CP2": ("packed", {"context_parallel_size": 2}),
}


@pytest.mark.parametrize("newest", [False, True], ids=["", "v2"])
@pytest.mark.parametrize("cell", CELLS)
def test_sft_and_grpo_take_the_steps_of_the_megatron_worker(
    cell: str,
    newest: bool,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    host_policy: Callable[..., Any],
) -> None:
    path = checkpoint("llama", vocab=256, tied=True)
    config = host.config_of(path, *CELLS[cell])
    dtensor = host.dtensor_of(config)
    dtensor["dtensor_cfg"]["_v2"] = newest
    batches = {
        kind: inputs_of(kind, at, Reference(path)) for at, kind in enumerate(("nll", "grpo"))
    }
    inside = torch.arange(WIDTH) < host.batch(rows(50))["input_lengths"].unsqueeze(-1)
    seen = []
    for each in (config, dtensor):
        policy = host_policy(each, 2)
        seen.append(steps(policy, batches))
    expected, found = seen
    for kind in batches:
        for name in ("loss", "grad_norm"):
            own, other = (float(torch.as_tensor(each[kind][name])) for each in (found, expected))
            print(f"{cell} {kind} {name}: {own:.8f} {other:.8f}")
            assert own == pytest.approx(other, rel=TOLERANCE)
    worst = (found["after"] - expected["after"])[inside].abs().max().item()
    print(f"{cell}: log-probabilities after two steps differ by {worst:.2e}")
    assert worst < TOLERANCE
    assert (found["after"] - found["before"])[inside].abs().max() > 100 * TOLERANCE
    if cell == "packed":
        saving = tmp_path / "weights"
        policy.prepare_for_training()
        policy.save_checkpoint(str(saving), optimizer_path=str(tmp_path / "optimizer"))
        assert list(saving.glob("iter_*"))


def steps(policy: Any, batches: dict[str, Any]) -> dict[str, Any]:
    """A step with each of the host's losses, and what the policy reads before and after."""
    read, found = host.batch(rows(50)), {}
    policy.prepare_for_lp_inference()
    found["before"] = policy.get_logprobs(read)["logprobs"]
    for kind, data in batches.items():
        policy.prepare_for_training()
        found[kind] = policy.train(data, host.losses()[kind])
    policy.prepare_for_lp_inference()
    found["after"] = policy.get_logprobs(read)["logprobs"]
    return found
