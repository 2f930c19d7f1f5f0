"""Every layout in bf16 against one process of Hugging Face transformers and torch's AdamW.

Weights are within one unit in the last place of their tensor's largest, see
`assert_bf16_weights_like_hf`; losses and gradient norms within 2 %. (In fp32, and with every
batching: test_invariance.py.)
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.converters.hf_files import read_config
from megatron_policy.converters.rows import fill_shard
from megatron_policy.converters.table import bind
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, policy_config, train_two_steps
from tests.dist.layouts import FAMILIES, LAYOUTS, LENGTH, VOCAB

# Small enough that the rounding of bf16 gradients moves no weight by a unit in its last place.
BF16_LR = 1e-3


@cache
def data():
    return oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)


@cache
def expected(path: Path) -> oracle.Trained:
    return oracle.train(path, data(), GLOBAL_BATCH, oracle.token_level, torch.bfloat16, BF16_LR)


def shards_of(path: Path, weights: dict[str, torch.Tensor], tp: int, rank: int, names: list[str]):
    """The tensor-parallel shards that Hugging Face `weights` amount to, under Megatron names."""
    table = bind(read_config(path))
    entries = {entry.megatron: entry for entry in table.entries}
    for name in names:
        row = entries[name].row
        shard = torch.empty(
            row.local_shape(table.architecture, tp), dtype=weights[entries[name].hf[0]].dtype
        )
        fill_shard(row, table.architecture, shard, [weights[h] for h in entries[name].hf], rank, tp)
        yield name, shard


def assert_trained_like_hf(
    path: Path, tp: int, seen: dict[str, Any], hf: oracle.Trained, rel: float
) -> None:
    for step, loss, norm in zip(seen["steps"], hf.losses, hf.grad_norms, strict=True):
        assert step["global_loss"].tolist() == pytest.approx([loss], rel=rel)
        assert step["grad_norm"].tolist() == pytest.approx([norm], rel=rel)
    assert seen["eval"]["global_loss"][0].item() == pytest.approx(hf.losses[0], rel=rel)


# The models take turns; both are under every layout in fp32 (tests/invariance).
@pytest.mark.parametrize(
    ("name", "tied"), list(zip(LAYOUTS, itertools.cycle(FAMILIES), strict=False))
)
def test_bf16_weights_after_two_steps_are_within_one_ulp_of_hf(
    ranks, checkpoints, name: str, tied: bool
) -> None:
    path, case = checkpoints[tied], LAYOUTS[name]
    config = policy_config(path, case.megatron, lr=BF16_LR, precision="bfloat16")
    hf = expected(path)
    for seen in ranks.run(case.world, train_two_steps, config, "token", data(), VOCAB, False):
        assert_trained_like_hf(path, case.tp, seen, hf, rel=2e-2)
        assert_bf16_weights_like_hf(path, case.tp, seen, hf)


def assert_bf16_weights_like_hf(
    path: Path, tp: int, seen: dict[str, Any], hf: oracle.Trained
) -> None:
    """No weight differs by more than one bf16 ulp of its tensor's largest weight.

    Gradients are sums of bf16 products, whose rounding depends on their order, so the fp32 main
    weights differ by a small part of an update; the ulp of a weight near zero is smaller than that
    for any two implementations. So that a matrix that was not trained at all cannot pass, its
    difference must also be small beside its update.
    """
    names, tp_rank = list(seen["weights"]), seen["coords"].tp
    start = dict(shards_of(path, start_weights(path), tp, tp_rank, names))
    for name, shard in shards_of(path, hf.weights, tp, tp_rank, names):
        weight = seen["weights"][name]
        assert weight.dtype == shard.dtype == torch.bfloat16
        largest = shard.abs().max()
        ulp = torch.nextafter(largest, torch.tensor(torch.inf, dtype=largest.dtype)) - largest
        weight, expected, before = weight.float(), shard.float(), start[name].float()
        assert (weight - expected).abs().max() <= ulp.float(), name
        if weight.dim() > 1:
            assert (weight - expected).norm() <= 0.25 * (expected - before).norm(), name


@cache
def start_weights(path: Path) -> dict[str, torch.Tensor]:
    model = oracle.load_hf(path, torch.bfloat16)
    return {name: p.detach() for name, p in model.named_parameters()}
