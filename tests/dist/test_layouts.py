"""Every layout in bf16, and some in fp16, against one process of Hugging Face transformers and
torch's AdamW in fp64.

A result in bf16 is no further from the truth than Hugging Face's own in bf16, up to a small factor
whose derivation stands at each; the same holds of fp16. (In fp32, and with every batching:
test_invariance.py.)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.rows import fill_shard
from megatron_policy.converters.table import bind
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, policy_config, train_two_steps
from tests.dist.layouts import FAMILIES, LAYOUTS, LENGTH, VOCAB
from tests.exact import load_hf
from tests.margins import check

# Small enough that rounding gradients to bf16 moves no weight by a unit in its last place.
BF16_LR = 1e-3

UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The unit roundoff of each: a sum of products is exact to fp32, and then rounded to this.

Also how far off a loss can be, relative: it is a mean over tokens of log-probabilities, each from
logits that were rounded so. Their errors are independent, so that the mean is not as far off as one
of them can be.
"""
SCALE = 1024.0
"""The factor on losses in fp16: far from overflow, and small gradients keep their bits."""

ROOM = 2.5
"""How many times Hugging Face's distance from the truth a trained tensor can be away from it. That
distance is nearly all rounding weights to bf16 when they are stored, which everybody does alike:
1.00 to 1.03 times was seen in all layouts, 1.07 for the largest of a bias's 64 elements.
"""

SHARE_ROOM = 4.0
"""In standard deviations. Storing a weight rounds it by more than the sums' order moves it, so
distances alone would hardly notice a matrix that was not trained. The share of the right update
that a tensor has moved averages rounding out: it differs between two implementations by errors that
are independent of the update's direction, so by about the tensor's distance from the truth over the
square root of its elements, both in units of the update.
"""


@cache
def data():
    return oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)


@dataclass(frozen=True)
class Expected:
    """What one process learns, from the weights in bf16 or fp16: in fp64, and as transformers does
    in that; weights under their Hugging Face names.
    """

    dtype: torch.dtype
    start: dict[str, torch.Tensor]
    exact: oracle.Trained
    rounded: oracle.Trained
    rounding: oracle.Rounding


@cache
def expected(path: Path, half: torch.dtype = torch.bfloat16) -> Expected:
    """Of a checkpoint in `half`."""
    start = {name: p.detach() for name, p in load_hf(path, half).named_parameters()}
    scale = SCALE if half is torch.float16 else 1.0
    exact, rounded = (
        oracle.train(path, data(), GLOBAL_BATCH, oracle.token_level, dtype, BF16_LR, scale=scale)
        for dtype in (torch.float64, half)
    )
    return Expected(half, start, exact, rounded, oracle.Rounding.of(rounded, exact))


def shards_of(path: Path, weights: dict[str, torch.Tensor], tp: int, rank: int, names: list[str]):
    """The tensor-parallel shards that Hugging Face `weights` amount to, under Megatron names; the
    weights themselves if `names` are theirs.
    """
    if set(names) <= weights.keys():
        yield from ((name, weights[name]) for name in names)
        return
    table = bind(read_config(path))
    entries = {entry.megatron: entry for entry in table.entries}
    for name in names:
        row = entries[name].row
        shard = torch.zeros(
            row.local_shape(table.architecture, tp), dtype=weights[entries[name].hf[0]].dtype
        )
        fill_shard(row, table.architecture, shard, [weights[h] for h in entries[name].hf], rank, tp)
        yield name, shard


def assert_same_shards(
    hf: oracle.Learned, path: Path, tp: int, rank: int, weights: dict[str, torch.Tensor]
) -> None:
    """A rank's weights after training are as close as rounding allows."""
    for name, shard in shards_of(path, hf.exact.weights, tp, rank, list(weights)):
        hf.assert_same_weight(weights[name], shard, name)


def assert_steps_like_hf(seen: dict[str, Any], hf: Expected) -> None:
    steps = zip(seen["steps"], hf.exact.losses, hf.exact.grad_norms, strict=True)
    for step, loss, norm in steps:
        check(f"{hf.dtype} loss", abs(step["loss"].item() / loss - 1), UNITS[hf.dtype])
        # A norm is off by no more than the vector is, most of whose error is across its direction.
        check(
            f"{hf.dtype} grad norm", abs(step["grad_norm"].item() / norm - 1), hf.rounding.grad_norm
        )
    evaluated = seen["eval"]["loss"][0].item()
    check(f"{hf.dtype} loss", abs(evaluated / hf.exact.losses[0] - 1), UNITS[hf.dtype])


# The models take turns; both are under every layout in fp32 (tests/invariance).
@pytest.mark.parametrize(("name", "tied"), zip(LAYOUTS, itertools.cycle(FAMILIES), strict=False))
def test_bf16_training_is_as_near_to_exact_arithmetic_as_that_of_hf(
    ranks, bf16_checkpoints, name: str, tied: bool
) -> None:
    path, case = bf16_checkpoints[tied], LAYOUTS[name]
    config = policy_config(path, case.megatron, lr=BF16_LR, precision="bfloat16")
    hf = expected(path)
    for seen in ranks.run(case.world, train_two_steps, config, "token", data(), VOCAB, False):
        assert_steps_like_hf(seen, hf)
        assert_weights_like_hf(path, case.tp, seen, hf)


IN_FP16 = (
    "one process",
    "TP2+SP",
    "PP2xVPP2",
    "DP2 distributed optimizer, both overlaps",
    "TP2xCP2+SP",
)


@pytest.mark.parametrize(("name", "tied"), zip(IN_FP16, itertools.cycle(FAMILIES), strict=False))
def test_fp16_training_is_as_near_to_exact_arithmetic_as_that_of_hf(
    ranks, fp16_checkpoints, name: str, tied: bool
) -> None:
    path, case = fp16_checkpoints[tied], LAYOUTS[name]
    config = policy_config(path, case.megatron, lr=BF16_LR, precision="float16")
    config["megatron_cfg"]["optimizer"]["initial_loss_scale"] = SCALE
    hf = expected(path, torch.float16)
    for seen in ranks.run(case.world, train_two_steps, config, "token", data(), VOCAB, False):
        assert [(step["loss_scale"], step["skipped_steps"]) for step in seen["steps"]] == [
            (SCALE, 0),
            (SCALE, 0),
        ]
        assert_steps_like_hf(seen, hf)
        assert_weights_like_hf(path, case.tp, seen, hf)


def assert_weights_like_hf(path: Path, tp: int, seen: dict[str, Any], hf: Expected) -> None:
    """No trained tensor is further from the truth than Hugging Face's, up to `ROOM`, and every
    matrix has moved along the right update as far as Hugging Face's has, up to `SHARE_ROOM`.
    """
    names, rank = list(seen["weights"]), seen["coords"].tp
    starts, exacts, theirs = (
        dict(shards_of(path, weights, tp, rank, names))
        for weights in (hf.start, hf.exact.weights, hf.rounded.weights)
    )
    for name in names:
        weight, exact = seen["weights"][name], exacts[name]
        assert weight.dtype == theirs[name].dtype == hf.dtype
        if not exact.any():  # a shard of nothing but the vocabulary's padding
            assert not weight.any(), name
            continue
        distance = (theirs[name].double() - exact).norm()
        apart = float((weight.double() - exact).norm())
        check(f"{hf.dtype} weights", apart, ROOM * float(distance), name)
        update = exact - starts[name].double()
        if weight.dim() > 1:
            noise = float(distance / update.norm()) / update.numel() ** 0.5
            ours, hfs = (moved(w, starts[name], update) for w in (weight, theirs[name]))
            check(f"{hf.dtype} share of the update", abs(ours - hfs), SHARE_ROOM * noise, name)
            assert 10 * SHARE_ROOM * noise < 0.9, f"{name}: too little to tell from no training"


def moved(weight: torch.Tensor, start: torch.Tensor, update: torch.Tensor) -> float:
    """How much of the update the weight has made: 1 is all of it."""
    return float(((weight.double() - start.double()) * update).sum() / update.square().sum())
