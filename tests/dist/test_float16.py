"""Training in float16 with a factor on losses: overflows skip steps, the factor moves, and it goes
on from a checkpoint. (How near the results are to exact arithmetic: test_layouts.py.)
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import CheckpointError, ConversionError
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, LENGTH, OVERLAPPED, VOCAB
from tests.dist.resuming import merged, paths, resumed
from tests.dist.test_loss_mistakes import NoGradientOfSqrt, hear, unchanged
from tests.mistaken import Mistaken

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


def overflow(config: dict[str, Any]) -> dict[str, Any]:
    """Three calls that skip their step, then a factor that fits."""
    with open_policy(config, init_reference_model=False) as policy:
        seen: dict[str, Any] = {"skipped": [], "steps": []}
        for _ in range(3):
            with unchanged(policy):
                seen["skipped"].append(train(policy))
        policy.accumulator.begin(LOSSES["token"]())
        policy.accumulator.microbatch(own_share(policy, batch()))
        with unchanged(policy):
            seen["skipped"].append(policy.accumulator.finish())
        policy._engine.trainable.scaling._scaler._scale.fill_(1024.0)
        seen["taken"] = train(policy)
        seen["count"] = policy.steps
        return seen


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
    for seen in ranks.run(world, overflow, scaled(path, megatron, initial_loss_scale=HUGE)):
        skipped = seen["skipped"]
        assert [each["skipped_steps"] for each in skipped] == [1, 1, 1, 1]
        assert [each["loss_scale"] / HUGE for each in skipped] == [1, 1 / 2, 1 / 4, 1 / 8]
        for each in skipped:
            assert not each["grad_norm"].isfinite() and each["loss"].isfinite()
            assert "moe_metrics" not in each
        taken = seen["taken"]
        assert (taken["skipped_steps"], taken["loss_scale"], seen["count"]) == (0, 1024.0, 1)
        torch.testing.assert_close(skipped[-1]["loss"], taken["loss"], rtol=1e-3, atol=0)


def gradients(config: dict[str, Any]) -> list[torch.Tensor]:
    """Unclipped gradients of a step, which are divided by the factor in their fp32 buffers."""
    with open_policy(config, init_reference_model=False) as policy:
        train(policy)
        return [p.main_grad.clone() for _, p in policy.named_parameters() if p.requires_grad]


def test_losses_of_routers_have_the_factor_too(ranks, checkpoint) -> None:
    """Else their gradients would vanish as the factor grows."""
    path = checkpoint("qwen3_moe", vocab=VOCAB)
    balanced = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 10.0,
        "moe_z_loss_coeff": 1.0,
    }
    plain = policy_config(path, balanced, max_grad_norm=0.0)
    half = scaled(path, balanced, initial_loss_scale=256.0) | {"max_grad_norm": 0.0}
    (exact,), (found,) = (ranks.run(1, gradients, config) for config in (plain, half))
    apart = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    length = sum(float(b.square().sum()) for b in exact)
    assert apart**0.5 < 0.02 * length**0.5


def grow(config: dict[str, Any]) -> list[float]:
    with open_policy(config, init_reference_model=False) as policy:
        return [train(policy)["loss_scale"] for _ in range(4)]


def test_the_factor_doubles_after_a_window_of_good_steps(ranks, checkpoints) -> None:
    growing = {"initial_loss_scale": 64.0, "loss_scale_window": 2}
    for seen in ranks.run(2, grow, scaled(checkpoints[True], OVERLAPPED, **growing)):
        assert seen == [64.0, 128.0, 128.0, 256.0]
    fixed = scaled(checkpoints[True], {}, loss_scale=96.0, loss_scale_window=1)
    assert ranks.run(1, grow, fixed) == [[96.0] * 4]


def mistakes(config: dict[str, Any]) -> dict[str, Any]:
    with open_policy(config, init_reference_model=False) as policy:
        scale = policy._engine.trainable.scaling
        with unchanged(policy):
            wrong = Mistaken("token", "NaN", rank=0, call=1)
            seen: dict[str, Any] = {"loss": hear(lambda: train(policy, wrong))}
        seen["after the loss"] = scale.value
        with unchanged(policy):
            seen["skipped"] = train(policy, NoGradientOfSqrt(1))["loss_scale"]
        with unchanged(policy):
            seen["gradient"] = hear(lambda: train(policy, NoGradientOfSqrt(1)))
        return seen


def test_what_no_smaller_factor_would_mend_is_an_error(ranks, checkpoints) -> None:
    """A loss that is not finite at once; a gradient at the least factor, or at a fixed one."""
    least = {"initial_loss_scale": 2.0, "min_loss_scale": 1.0, "hysteresis": 1}
    for seen in ranks.run(2, mistakes, scaled(checkpoints[True], {}, **least)):
        assert "returned nan" in seen["loss"] and seen["after the loss"] == 2.0
        assert seen["skipped"] == 1.0
        assert "the gradient's norm is nan" in seen["gradient"]
        assert "overflow float16 at loss scale 1, which" in seen["gradient"]
        assert "min_loss_scale, or set policy.precision to bfloat16" in seen["gradient"]


def refuse(config: dict[str, Any]) -> str:
    with open_policy(config, init_reference_model=False) as policy, unchanged(policy):
        return hear(lambda: train(policy))


def test_an_overflow_at_a_fixed_factor_is_an_error(ranks, checkpoints) -> None:
    (said,) = ranks.run(1, refuse, scaled(checkpoints[True], {}, loss_scale=HUGE))
    assert "lower megatron_cfg.optimizer.loss_scale" in said


def opened(config: dict[str, Any]) -> str:
    return hear(lambda: open_policy(config).__enter__(), ConversionError)


def test_a_weight_that_float16_cannot_hold_is_refused(ranks, checkpoints, tmp_path) -> None:
    source = shutil.copytree(checkpoints[True], tmp_path / "source")
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, file)
    (said,) = ranks.run(1, opened, scaled(source, {}))
    assert "model.norm.weight has a weight that float16 cannot hold" in said
    assert "set policy.precision to bfloat16 or float32" in said


def save(config: dict[str, Any], root: Path) -> None:
    with open_policy(config, init_reference_model=False) as policy:
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
    ranks.run(1, save, policy_config(path, {}, precision="bfloat16"), tmp_path)
    (seen,) = ranks.run(1, load, scaled(path, {}, initial_loss_scale=512.0), tmp_path)
    why = "None in the checkpoint; the configuration's 512.0 is used"
    assert seen == ({"schedule.loss_scale": why}, 512.0, True)
