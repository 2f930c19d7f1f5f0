"""Probes of a real vLLM: experts that its kernels do not renew, a changed element, and health."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.errors import RefitError
from megatron_policy.refit.probe import EngineProbe
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.dist.refits import LAYOUTS, config_of
from tests.losses import TokenNLL
from tests.vllm.engines import EngineCaller
from tests.vllm.extension import BREAKING

SIZES = {"hidden": 128, "layers": 2}
VOCAB = 256


def train(policy: MegatronPolicy, seed: int) -> None:
    """One step on two random rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (2, 24), generator=generator)
    batch = BatchedDataDict(
        input_ids=tokens,
        input_lengths=torch.full((2,), tokens.shape[1]),
        token_mask=torch.ones_like(tokens, dtype=torch.float32),
        sample_mask=torch.ones(2),
    )
    policy.train(batch, TokenNLL())


def probed(
    address: str, path: Path, cfg: dict[str, Any], socket: str, faults: list[tuple[str, Any]]
) -> list[Any]:
    """What is said after a step and a refit, once for each of the faults: methods of the engine,
    called before, and what to call to undo it.
    """
    policy = MegatronPolicy(config_of(path, cfg), init_reference_model=False)
    seen: list[Any] = []
    try:
        with EngineCaller(address) if policy.rank == 0 else nullcontext() as engine:
            info = policy.exporter.plan().info()
            if engine is not None:
                engine.call("prepare", info, 60.0, False)

            def hand_over() -> None:
                if engine is not None:
                    engine.begin("receive_stream", socket)
                policy.refit(IpcStream(socket, 64 * 1024))
                if engine is not None:
                    engine.result()

            probe = EngineProbe(
                (lambda rows: engine.call("logprobs", rows)) if engine else None,
                hand_over,
                (lambda: engine.call("mark_mixed")) if engine else None,
                every=1,
            )
            for step, (fault, argument) in enumerate(faults, start=1):
                train(policy, step)
                if fault == "damage":  # after the refit
                    hand_over()
                if fault and engine is not None:
                    engine.call(fault, argument)
                try:
                    (policy.probe if fault == "damage" else lambda p: p.refit(policy))(probe)
                    words = "fine"
                except RefitError as error:
                    words = str(error)
                state = engine.call("state") if engine else None
                seen.append((words, probe.probes, state))
    finally:
        policy.shutdown()
    return seen


@pytest.mark.parametrize(
    ("family", "module"),
    [
        pytest.param("qwen3_moe", "engine_process", marks=pytest.mark.daily),
        ("qwen2", "engine_process"),
        ("qwen2", "async_process"),
    ],
)
def test_a_probe_closes_a_refit(
    ranks: Any,
    engine: Callable[..., str],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    module: str,
) -> None:
    experts = family == "qwen3_moe"
    # Packed experts of this size have the shape of those that are not: vLLM's own reload is silent.
    path = checkpoint(family, **SIZES, **({"moe_intermediate_size": 64} if experts else {}))
    world, cfg = LAYOUTS["tp2"]
    fault = ("renew_experts", False) if experts else ("damage", ("lm_head.weight", 7, 3, 0.25))
    again = ("renew_experts", True) if experts else ("", None)
    address = engine(path, module=module, worker_extension_cls=BREAKING)
    run = (address, path, cfg, f"ipc://{tmp_path}/refit.sock", [("", None), fault, again])
    seen, other = ranks.run(world, probed, *run)
    for entry in seen:
        print(entry)
    assert [words for words, *_ in other] == [words for words, *_ in seen]
    (first, _, _), (words, probes, state), (last, _, after) = seen
    assert first == last == "fine" and probes == 1
    if experts:
        assert "Without its experts it agrees: its kernels read them in another form" in words
        assert state == (2, True) and after == (3, False)
    else:
        assert "token 7 at position" in words and "Another refit has put it right" in words
        assert state == (2, False) and after == (3, False)
