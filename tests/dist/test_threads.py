"""A policy on the CPU takes few threads of its process, and gives back all of them when it is shut
down, whether or not it is kept, and before Python's collector has found anything.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.policy import MegatronPolicy
from tests.dist.cases import policy_config
from tests.losses import TokenNLL
from tests.other_process import OtherProcess

MOST = 12
"""Threads of one policy on one rank."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Megatron-Core": ("qwen2", {}),
    "distributed optimizer": (
        "qwen2",
        {
            "optimizer": {"use_distributed_optimizer": True},
            "distributed_data_parallel_config": {
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
        },
    ),
    "experts": ("qwen3_moe", {"activation_checkpointing": True}),
    "MLA": ("deepseek_v3", {}),
    "FSDP2": ("qwen2", {"dtensor_cfg": {}}),
    "FSDP1": ("qwen2", {"fsdp_cfg": {}}),
}


@pytest.fixture
def process() -> Iterator[OtherProcess]:
    made = OtherProcess()
    yield made
    made.kill()


def threads() -> int:
    """Those of this process, without torch's own for backward passes, which it makes once."""
    names = (task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())
    return sum(not name.startswith("pt_autograd") for name in names)


def use(policy: MegatronPolicy, root: Path) -> None:
    """Train, score, export and save."""
    ids = torch.arange(64).reshape(8, 8) % 40
    rows = {"token_mask": torch.ones(8, 8), "sample_mask": torch.ones(8)}
    policy.train(BatchedDataDict({"input_ids": ids, **rows}), TokenNLL())
    policy.logprobs(BatchedDataDict({"input_ids": ids}))
    dict(policy.export())
    policy.save_checkpoint(root / f"step_{policy.steps}", root / f"optimizer_{policy.steps}")


def count_one_after_another(config: dict[str, Any], root: Path) -> tuple[int, list[int], list[int]]:
    """Threads before, with each of three policies, and after the shutdown of each."""
    gc.disable()
    before, with_it, after, kept = threads(), [], [], []
    for number in range(3):
        policy = MegatronPolicy(config)
        use(policy, root / str(number))
        with_it.append(threads())
        policy.shutdown()
        after.append(threads())
        kept.append(policy)
    return before, with_it, after


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_gives_back_its_few_threads_at_shutdown(
    process, checkpoint, tmp_path, kind: str
) -> None:
    family, section = KINDS[kind]
    config = policy_config(checkpoint(family), section)
    before, with_it, after = process.call(count_one_after_another, config, tmp_path)
    assert max(with_it) <= before + MOST
    assert after == [before] * 3


def count_two_at_once(config: dict[str, Any], root: Path) -> tuple[int, int, int]:
    """Threads before, with two policies of one process, and when both are shut down."""
    gc.disable()
    before = threads()
    first, second = MegatronPolicy(config), MegatronPolicy(config)
    both = threads()
    first.shutdown()
    use(second, root)
    second.shutdown()
    return before, both, threads()


@pytest.mark.parametrize("kind", ["Megatron-Core", "FSDP2"])
def test_the_first_of_two_policies_leaves_the_other_whole(
    process, checkpoint, tmp_path, kind: str
) -> None:
    family, section = KINDS[kind]
    config = policy_config(checkpoint(family), section)
    before, both, after = process.call(count_two_at_once, config, tmp_path)
    assert both <= before + 2 * MOST
    assert after == before
