"""Training goes on from a checkpoint where the policy computes on GPUs: through page-locked memory,
beside the training or not, with the devices' own random numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoint_once import sync
from benchmarks.checkpointing import PAIRS
from benchmarks.checkpoints import Size, write_checkpoint
from tests.dist.cases import open_policy
from tests.dist.layouts import OVERLAPPED, SIZES, layout
from tests.dist.resuming import (
    TOKENIZER,
    config_of,
    differing,
    everything_of,
    paths,
    prints,
    resumed,
    train,
)

WIDE = SIZES | {"hidden": 512, "ffn": 1408}  # several windows of what goes through the host


def saved(config: dict[str, Any], root: Path) -> dict[str, str]:
    with open_policy(config, tokenizer=TOKENIZER) as policy:
        train(policy, range(2))
        policy.save_checkpoint(**paths(root))
        train(policy, range(2, 4))
        torch.rand(3, device="cuda")
        return prints(everything_of(policy))


def gone_on(config: dict[str, Any], root: Path) -> dict[str, str]:
    with resumed(config, root) as policy:
        train(policy, range(2, 4))
        torch.rand(3, device="cuda")
        return prints(everything_of(policy))


def compare(gpu_ranks, config: dict[str, Any], root: Path, world: int) -> None:
    expected = gpu_ranks.run(world, saved, config, root)
    for before, after in zip(expected, gpu_ranks.run(world, gone_on, config, root), strict=True):
        assert not differing(before, after)


@pytest.mark.gpu
@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_four_steps_equal_two_a_save_a_load_and_two(
    gpu_ranks, checkpoint, tmp_path: Path, precision: str, wait: bool
) -> None:
    beside = {"checkpoint": {"async_save": not wait}}
    path = checkpoint("qwen2", tied=True, **WIDE)
    config = config_of(path, OVERLAPPED, beside, precision=precision)
    compare(gpu_ranks, config, tmp_path, 1)


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("case", [layout(2, tp=2), layout(2, **OVERLAPPED)], ids=["TP2", "DP2"])
def test_so_they_do_on_several(gpu_ranks, checkpoint, tmp_path: Path, case) -> None:
    path = checkpoint("qwen2", tied=True, **WIDE)
    config = config_of(path, case.megatron, precision="bfloat16")
    compare(gpu_ranks, config, tmp_path, 2)


@pytest.mark.gpu
def test_saves_and_loads_of_a_gpus_policy_are_timed_beside_plain_files(
    gpu_ranks, tmp_path: Path
) -> None:
    size = Size(hidden=32, ffn=48, layers=2, heads=4, groups=2, vocab=128)
    path, box = write_checkpoint(tmp_path / "checkpoint", size), tmp_path / "box"
    box.mkdir()
    (found,) = gpu_ranks.run(1, sync, path, box, 1)
    assert found["wall_s"].keys() == {*PAIRS, *PAIRS.values()}
