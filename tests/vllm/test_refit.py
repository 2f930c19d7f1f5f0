"""A real vLLM follows a policy that trains: what it computes is what the policy computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.dist.refits import LAYOUTS, config_of
from tests.losses import TokenNLL
from tests.vllm.engines import EngineCaller

VOCAB, COUNT = 256, 12
PROMPTS = [[5, 6, 7, 8], [11, 200, 3, 99], [42, 43, 17, 0]]
TOLERANCE = 3e-5
"""For a log-probability in fp32. Weights are equal bit for bit; kernels and the order of sums are
not, which makes about 1e-6 here. A tensor that is stale makes more than 1e-2.
"""


def batch_of(rows: list[list[int]]) -> BatchedDataDict:
    tokens = torch.tensor(rows)
    return BatchedDataDict(
        input_ids=tokens,
        input_lengths=torch.full((len(rows),), tokens.shape[1]),
        token_mask=torch.ones_like(tokens, dtype=torch.float32),
        sample_mask=torch.ones(len(rows)),
    )


def train(policy: MegatronPolicy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(VOCAB, (2, 24), generator=generator)
    policy.train(batch_of(rows.tolist()), TokenNLL())


def compare_samples(policy: MegatronPolicy, engine: EngineCaller | None) -> dict[str, float]:
    """How far the engine's log-probabilities of its own samples, and those of the same rows as
    prompts, are from the policy's.
    """
    sampled: list[Any] = [None]
    if engine is not None:
        sampled = [engine.call("sample", PROMPTS, COUNT, temperature=1.0, seed=3)]
    dist.broadcast_object_list(sampled)
    rows = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, sampled[0], strict=True)]
    own = policy.logprobs(batch_of(rows)).cpu()
    if engine is None:
        return {}
    scored = torch.tensor(engine.call("logprobs", rows))
    drawn = torch.tensor([logprobs for _, logprobs in sampled[0]])
    return {
        "samples": (drawn - own[:, -COUNT:]).abs().max().item(),
        "prompts": (scored - own[:, 1:]).abs().max().item(),
    }


def follow(
    address: str, path: Path, cfg: dict[str, Any], socket: str, refits: int, staged: bool
) -> list[dict[str, Any]]:
    """Rank 0's view: what is compared after each step and refit, and the engine's state."""
    policy = MegatronPolicy(config_of(path, cfg), init_reference_model=False)
    seen = []
    try:
        with EngineCaller(address) if policy.rank == 0 else nullcontext() as engine:
            info = policy.exporter.plan().info()
            if engine is not None:
                engine.call("prepare", info, 60.0, staged)
            for step in range(1, refits + 1):
                train(policy, step)
                if engine is not None:
                    engine.begin("receive_stream", socket)
                policy.refit(IpcStream(socket, 64 * 1024))
                got = None if engine is None else (engine.result(), engine.call("state"))
                seen.append(compare_samples(policy, engine) | {"step": got})
    finally:
        policy.shutdown()
    return seen


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("staged", [False, True])
def test_an_engine_follows(
    ranks: Any,
    engine: Callable[..., str],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    staged: bool,
) -> None:
    path = checkpoint(family, hidden=128, layers=2)
    layout = "tp2"
    world, cfg = LAYOUTS[layout]
    seen, _ = ranks.run(
        world, follow, engine(path), path, cfg, f"ipc://{tmp_path}/refit.sock", 3, staged
    )
    print(seen)
    assert [entry["step"] for entry in seen] == [(n, (n, False)) for n in (1, 2, 3)]
    for entry in seen:
        assert entry["samples"] <= TOLERANCE and entry["prompts"] <= TOLERANCE, seen
