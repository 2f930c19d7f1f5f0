"""Recurrences in half precisions: what states are made of is held in fp32, trained, and handed over
in the dtype of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_policy.config import PolicyConfig
from tests.checkpoints import make_checkpoint, saved_tensors
from tests.dist.cases import policy_config, train_two_steps
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, SIZES, VOCAB
from tests.dist.test_estimate import Case, assert_states, measure
from tests.dist.test_export import assert_same_tensors, export, tensors_of
from tests.dist.test_layouts import (
    BF16_LR,
    SCALE,
    Expected,
    assert_steps_like_hf,
    assert_weights_like_hf,
    data,
    expected,
    shards_of,
)
from tests.exact import load_hf
from tests.margins import check

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KEPT = ("A_log", "self_attn.dt_bias", "mixer.D", "linear_attn.norm.weight", "o_norm.weight")
"""What makers keep in fp32."""
DENSE: dict[str, dict[str, Any]] = {
    "kimi_linear": {"mlp_layer_types": ["dense"] * 4, "linear_head_dim": 24},
    "lfm2": {},
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3], "initializer_range": 0.05},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "n_groups": 4,
    },
}
"""Without experts, which half precisions would let other tokens choose. Gradients through the norms
of queries and keys that are as large as 0.1 makes them are a third rounding in bf16.
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Callable[..., Path]:
    """Makes checkpoints in a half precision, but for what makers keep in fp32."""

    def make(family: str, precision: str, **more: Any) -> Path:
        path = make_checkpoint(tmp_path / family, family, dtype=precision, **SIZES | more)
        tensors = tensors_of(path)
        for name, tensor in tensors.items():
            if name.endswith(KEPT):  # by what neither half precision can hold
                tensors[name] = tensor.float() + 1e-5
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return make


def learn(path: Path, precision: str) -> Expected:
    """What one process learns, under the names of the checkpoint."""
    hf = expected(path, HALVES[precision])

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model = load_hf(path, next(iter(tensors.values())).dtype)
        model.load_state_dict(tensors, strict=False)
        return saved_tensors(model)

    exact, rounded = (
        replace(trained, weights=rename(trained.weights)) for trained in (hf.exact, hf.rounded)
    )
    return replace(hf, start=rename(hf.start), exact=exact, rounded=rounded)


@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    [
        ("qwen3_next", "DP2 distributed optimizer, both overlaps", "bfloat16"),
        ("qwen3_next", "TP2xCP2+SP", "bfloat16"),
        ("nemotron_h", "TP2+SP", "bfloat16"),
        ("nemotron_h", "DP2 distributed optimizer, both overlaps", "float16"),
        ("lfm2", "PP2xVPP2", "bfloat16"),
        ("kimi_linear", "PP2xVPP2", "bfloat16"),
    ],
)
def test_half_precisions_are_as_near_to_exact_arithmetic_as_transformers(
    ranks, mixed, family: str, layout: str, precision: str
) -> None:
    path, case = mixed(family, precision, **DENSE[family]), LAYOUTS[layout]
    config = policy_config(path, case.megatron, lr=BF16_LR, precision=precision)
    if precision == "float16":
        config["megatron_cfg"]["optimizer"]["initial_loss_scale"] = SCALE
    hf = learn(path, precision)
    given = (train_two_steps, config, "token", data(), VOCAB, False)
    for seen in ranks.run(case.world, *given):
        assert_steps_like_hf(seen, hf)
        assert_weights_like_hf(path, case.tp, seen, hf)
        assert_wide_weights_moved(path, case.tp, seen, hf)


def assert_wide_weights_moved(path: Path, tp: int, seen: dict[str, Any], hf: Expected) -> None:
    """What is held in fp32 begins with all bits of the file, and is nearer to the truth than a
    quarter of its update: gradients of it are up to a tenth rounding.
    """
    names = [name for name, weight in seen["weights"].items() if weight.dtype == torch.float32]
    tensors, rank = tensors_of(path), seen["coords"].tp
    starts, exacts = (
        dict(shards_of(path, weights, tp, rank, names)) for weights in (tensors, hf.exact.weights)
    )
    for name in names:
        apart = (seen["weights"][name].double() - exacts[name]).norm()
        update = (exacts[name] - starts[name].double()).norm()
        check("wide weights", float(apart), 0.25 * float(update), name)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("nemotron_h", "TP2+SP"),
        ("qwen3_next", "TP2xCP2+SP"),
        ("lfm2", "PP2xVPP2"),
        ("nemotron_h", "FSDP2 x 2"),
        ("kimi_linear", "FSDP2 x 2"),
        ("olmo_hybrid", "FSDP2 x 2"),
    ],
)
def test_mixed_dtypes_come_back_bit_equal(
    ranks, mixed, tmp_path: Path, family: str, layout: str
) -> None:
    path, case = mixed(family, "bfloat16"), (LAYOUTS | FSDP2_LAYOUTS)[layout]
    config = policy_config(path, case.megatron, precision="bfloat16")
    ranks.run(case.world, export, config, tmp_path / "exported")
    assert_same_tensors(tmp_path / "exported", path)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["DP2 distributed optimizer, both overlaps", "TP2+SP"])
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_plan_says_what_ranks_hold_from_step_to_step(
    ranks, mixed, family: str, layout: str
) -> None:
    of = Case(family, LAYOUTS[layout])
    raw = of.config(mixed(family, "bfloat16", hidden=128))
    found = ranks.run(of.layout.world, measure, raw, of.rows, of.length)
    assert_states(PolicyConfig.parse(raw), of, found)
