"""A real vLLM that follows 50 training steps by what has changed: after each of them it computes
what one does that has received all weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_policy import MegatronPolicy
from megatron_policy.refit.deltas.message import decode_message
from megatron_policy.refit.transports.deltas import DeltaDirectory
from tests import oracle
from tests.dist.cases import policy_config
from tests.exact import Exact, assert_equal, furthest, load_hf
from tests.vllm.engines import EngineCaller, options_of
from tests.vllm.sessions import FIXED, LAYOUTS, ROWS, SIZES, TIMES, Session, by_stream

STEPS, EXACT_EVERY = 50, 10
RATE = 3e-5
"""At which some 1 to 5 % of the elements of bf16 weights change in a step."""

TOLERANCE = 1e-6
"""Of log-probabilities in fp32, beside those of a vLLM that has received all weights: the weights
are the same, and so is the order of sums.
"""


@dataclass
class Followed:
    """What is seen of one step."""

    step: int
    sent: int
    """Bytes of all ranks."""
    encodings: Counter[str]
    changed: int
    """Elements."""
    by_deltas: torch.Tensor
    by_whole: torch.Tensor
    exported: Path


def follow(addresses: tuple[str, str], path: Path, folder: Path) -> list[Followed]:
    """Train; one engine receives what has changed, the other all weights. Rank 0 has seen it."""
    sizes = {"train_global_batch_size": ROWS, "max_total_sequence_length": 32}
    config = policy_config(path, LAYOUTS["tp2"][2], RATE, precision="bfloat16", **sizes, **TIMES)
    policy = MegatronPolicy(config, init_reference_model=False)
    first = policy.rank == 0
    seen: list[Followed] = []
    try:
        with (
            EngineCaller(addresses[0]) if first else nullcontext() as engine,
            EngineCaller(addresses[1]) if first else nullcontext() as other,
        ):
            deltas = Session(policy, engine, 1, folder)
            whole = Session(policy, other, 1, folder)
            deltas.prepare(staged=True)
            whole.prepare(staged=False)
            for step in range(STEPS + 1):
                if step:
                    deltas.train()
                policy.refit(DeltaDirectory(folder / "chain", whole_every=STEPS + 2))
                returned = deltas.call("receive_deltas", str(folder / "chain"))
                by_stream(whole)
                exported = folder / f"exported-{step}"
                if step % EXACT_EVERY == 0:
                    policy.export_hf(exported)
                if first:
                    assert returned == step and deltas.call("state") == (step, False)
                    files = [*(folder / "chain").glob(f"*/{step:08d}.delta/*.delta")]
                    fragments = [f for file in files for f in decode_message(file.read_bytes())]
                    seen.append(
                        Followed(
                            step,
                            sum(file.stat().st_size for file in files),
                            Counter(each.encoded.encoding for each in fragments),
                            sum(each.encoded.changes for each in fragments),
                            torch.tensor(deltas.call("logprobs", FIXED)),
                            torch.tensor(whole.call("logprobs", FIXED)),
                            exported,
                        )
                    )
    finally:
        policy.shutdown()
    return seen


def test_vllm_follows_50_steps_by_what_has_changed(
    ranks: Any, engine: Callable[..., str], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint("qwen2", **SIZES, dtype="bfloat16")
    options = options_of("qwen2")
    addresses = engine(path, **options), engine(path, **options, seed=1)  # one after the other
    seen, *_ = ranks.run(2, follow, addresses, path, tmp_path)
    elements = sum(tensor.numel() for tensor in load_hf(path).state_dict().values())
    before, tokens = None, torch.tensor(FIXED)
    for each in seen:
        where = f"step {each.step}"
        assert furthest(each.by_deltas, each.by_whole) <= TOLERANCE, where
        if before is not None:  # the first one is whole
            assert 0.01 * elements < each.changed < 0.05 * elements, (where, each.changed)
            assert each.sent < 0.1 * 2 * elements, (where, each.sent)
            assert "whole" not in each.encodings and each.encodings, (where, each.encodings)
            moved = furthest(each.by_deltas, before)
            assert moved > 20 * TOLERANCE, f"{where}: old weights would not be seen"
        if each.step % EXACT_EVERY == 0:
            exact = Exact.of(each.exported, lambda model: oracle.hf_logprobs(model, tokens))
            assert_equal("engine", each.by_deltas, exact, where)
        before = each.by_deltas
