"""Every layout in bf16, and some in fp16, against one process of Hugging Face transformers and
torch's AdamW in fp64. And the factor on losses in fp16: overflows skip steps, it moves, and goes on
from a checkpoint.

A result in bf16 is no further from the truth than Hugging Face's own in bf16, up to a small factor
whose derivation stands at each; the same holds of fp16. (In fp32, and with every batching:
test_invariance.py.)
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.rows import fill_shard
from megatron_policy.converters.table import bind
from megatron_policy.errors import CheckpointError, ConversionError
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, own_share, policy_config, train_two_steps
from tests.dist.layouts import EXPERT_LAYOUTS, FAMILIES, LAYOUTS, LENGTH, OVERLAPPED, VOCAB
from tests.dist.resuming import merged, paths, resumed
from tests.dist.shortcuts import answer_trainable, refusal
from tests.dist.test_loss_mistakes import NoGradientOfSqrt, hear, unchanged
from tests.exact import load_hf
from tests.margins import check
from tests.mistaken import Mistaken

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
    """What one process learns of weights in a half precision: in fp64, and transformers in that."""

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
    wide = {entry.megatron for entry in bind(read_config(path)).entries if entry.row.keeps_dtype}
    for name in names:
        weight, exact = seen["weights"][name], exacts[name]
        assert weight.dtype == (torch.float32 if name in wide else hf.dtype), name
        assert theirs[name].dtype == hf.dtype or name in wide, name
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


HALF = {"precision": "float16"}
HUGE = 2.0**40
"""At this factor gradients overflow; halved, too."""


@cache
def batch(seed: int = 0) -> BatchedDataDict:
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB, seed=seed)
    data["sample_mask"] = torch.ones(GLOBAL_BATCH)
    return data


def scaled(path: Path, megatron: dict[str, Any], **optimizer: Any) -> dict[str, Any]:
    return policy_config(path, merged(megatron, {"optimizer": optimizer}), **HALF)


def train(policy: Any, loss: Any = None) -> dict[str, Any]:
    mbs = GLOBAL_BATCH // policy.topology.dp // 4
    return policy.train(own_share(policy, batch()), loss or LOSSES["token"](), mbs=mbs)


def overflow(policy: MegatronPolicy) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Calls that skip their step, and one with a factor that fits."""
    skipped = []
    for _ in range(3):
        with unchanged(policy):
            skipped.append(train(policy))
    policy.accumulator.begin(LOSSES["token"]())
    policy.accumulator.microbatch(own_share(policy, batch()))
    with unchanged(policy):
        skipped.append(policy.accumulator.finish())
    policy._engine.trainable.scaling._scaler._scale.fill_(1024.0)
    taken = train(policy)
    assert policy.steps == 1
    return skipped, taken


CASES = {
    "one process": (1, {}, "qwen2"),
    "DP2, both overlaps": (2, OVERLAPPED, "qwen2"),
    "TP2": (2, LAYOUTS["TP2"].megatron, "qwen2"),
    "PP2": (2, LAYOUTS["PP2"].megatron, "qwen2"),
    "experts": (2, EXPERT_LAYOUTS["EP2"].megatron, "deepseek_v3"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_overflow_skips_the_step_on_all_ranks_and_halves_the_factor(
    ranks, checkpoints, checkpoint, name: str
) -> None:
    """From the second on. Nothing else changes, and the schedule does not advance."""
    world, megatron, family = CASES[name]
    path = checkpoints[True] if family == "qwen2" else checkpoint(family, vocab=VOCAB)
    config = scaled(path, megatron, initial_loss_scale=HUGE)
    for skipped, taken in ranks.run(world, answer_trainable, config, overflow):
        assert [each["skipped_steps"] for each in skipped] == [1, 1, 1, 1]
        assert [each["loss_scale"] / HUGE for each in skipped] == [1, 1 / 2, 1 / 4, 1 / 8]
        for each in skipped:
            assert not each["grad_norm"].isfinite() and each["loss"].isfinite()
            assert "moe_metrics" not in each
        assert (taken["skipped_steps"], taken["loss_scale"]) == (0, 1024.0)
        torch.testing.assert_close(skipped[-1]["loss"], taken["loss"], rtol=1e-3, atol=0)


def gradients(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Unclipped gradients of a step, which are divided by the factor in their fp32 buffers."""
    train(policy)
    return [p.main_grad.clone() for _, p in policy.named_parameters() if p.requires_grad]


def test_losses_of_routers_have_the_factor_too(ranks, checkpoint) -> None:
    """Else their gradients would vanish as the factor grows."""
    path = checkpoint("qwen3_moe", vocab=VOCAB)
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 10.0}
    balanced |= {"moe_z_loss_coeff": 1.0}
    plain = policy_config(path, balanced, max_grad_norm=0.0)
    half = scaled(path, balanced, initial_loss_scale=256.0) | {"max_grad_norm": 0.0}
    (exact,), (found,) = (
        ranks.run(1, answer_trainable, config, gradients) for config in (plain, half)
    )
    apart = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    length = sum(float(b.square().sum()) for b in exact)
    assert apart**0.5 < 0.02 * length**0.5


def grow(policy: MegatronPolicy) -> list[float]:
    return [train(policy)["loss_scale"] for _ in range(4)]


def test_the_factor_doubles_after_a_window_of_good_steps(ranks, checkpoints) -> None:
    growing = {"initial_loss_scale": 64.0, "loss_scale_window": 2}
    path = checkpoints[True]
    found = ranks.run(2, answer_trainable, scaled(path, OVERLAPPED, **growing), grow)
    assert found == [[64.0, 128.0, 128.0, 256.0]] * 2
    fixed = scaled(path, {}, loss_scale=96.0, loss_scale_window=1)
    assert ranks.run(1, answer_trainable, fixed, grow) == [[96.0] * 4]


def make_mistakes(policy: MegatronPolicy) -> str:
    with unchanged(policy):
        wrong = Mistaken("token", "NaN", rank=0, call=1)
        assert "returned nan" in hear(lambda: train(policy, wrong))
    assert policy._engine.trainable.scaling.value == 2.0
    with unchanged(policy):
        assert train(policy, NoGradientOfSqrt(1))["loss_scale"] == 1.0
    with unchanged(policy):
        return hear(lambda: train(policy, NoGradientOfSqrt(1)))


def test_what_no_smaller_factor_would_mend_is_an_error(ranks, checkpoints) -> None:
    """A loss that is not finite at once; a gradient at the least factor, or at a fixed one."""
    least = {"initial_loss_scale": 2.0, "min_loss_scale": 1.0, "hysteresis": 1}
    config = scaled(checkpoints[True], {}, **least)
    for said in ranks.run(2, answer_trainable, config, make_mistakes):
        assert "the gradient's norm is nan" in said
        assert "overflow float16 at loss scale 1, which" in said
        assert "min_loss_scale, or set policy.precision to bfloat16" in said


def refuse(policy: MegatronPolicy) -> str:
    with unchanged(policy):
        return hear(lambda: train(policy))


def test_an_overflow_at_a_fixed_factor_is_an_error(ranks, checkpoints) -> None:
    config = scaled(checkpoints[True], {}, loss_scale=HUGE)
    (said,) = ranks.run(1, answer_trainable, config, refuse)
    assert "lower megatron_cfg.optimizer.loss_scale" in said


def test_a_weight_that_float16_cannot_hold_is_refused(ranks, checkpoints, tmp_path) -> None:
    source = shutil.copytree(checkpoints[True], tmp_path / "source")
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, file)
    (said,) = ranks.run(1, refusal, scaled(source, {}), ConversionError)
    assert "model.norm.weight has a weight that float16 cannot hold" in said
    assert "set policy.precision to bfloat16 or float32" in said


def save(root: Path, policy: MegatronPolicy) -> None:
    train(policy)
    policy.save_checkpoint(**paths(root))


def load(config: dict[str, Any], root: Path) -> tuple[dict[str, str], float, bool]:
    with resumed(config, root, init_reference_model=False) as policy:
        half = all(p.dtype == torch.float16 for _, p in policy.named_parameters())
        factor = train(policy)["loss_scale"]
        policy.load_checkpoint(**paths(root))
        trainable = policy._engine.trainable
        state = trainable.schedule_state() | {"loss_scale_good_steps": "many"}
        with pytest.raises(CheckpointError, match=r"loss scale cannot be used: .*'many' steps"):
            trainable.restore_schedule(state)
        return policy.loaded.not_restored, factor, half


def test_a_checkpoint_without_a_factor_starts_one(ranks, bf16_checkpoints, tmp_path) -> None:
    """And the report of the load says so."""
    path = bf16_checkpoints[True]
    config, step = policy_config(path, {}, precision="bfloat16"), partial(save, tmp_path)
    ranks.run(1, answer_trainable, config, step)
    (seen,) = ranks.run(1, load, scaled(path, {}, initial_loss_scale=512.0), tmp_path)
    why = "None in the checkpoint; the configuration's 512.0 is used"
    assert seen == ({"schedule.loss_scale": why}, 512.0, True)
