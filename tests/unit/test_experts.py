"""What configs of experts say together, and their layers that predict further tokens."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.converters.architecture import Rope
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.errors import ConversionError
from megatron_policy.weights.load import canonical_name
from tests.families import EXPERTS, PUBLISHED
from tests.mtp_checkpoints import NUMBERED
from tests.unit.test_family_configs import architecture, edited

FURTHER = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "embed_tokens.weight")
FURTHER += ("shared_head.norm.weight", "shared_head.head.weight")


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("mixtral", {"router_aux_loss_coef": 0.5}, 0.5),
        ("qwen3_moe", {}, 0.001),  # of transformers
        ("qwen3_moe", {"router_aux_loss_coef": 0.0}, 0.0),
        ("deepseek_v3", {"aux_loss_alpha": 0.002, "router_aux_loss_coef": 0.5}, 0.002),
        ("deepseek_v3", {}, None),
        ("glm4_moe", {}, None),
    ],
)
def test_the_makers_balancing_coefficient_is_known(
    tmp_path: Path, family: str, fields: dict[str, Any], expected: float | None
) -> None:
    found = architecture(edited(tmp_path, family, **fields)).moe
    assert found is not None and found.aux_loss_coeff == expected


def test_two_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    raw = read_config(edited(tmp_path, "qwen3_moe")) | {"num_experts": 4, "num_local_experts": 4}
    found = bind(raw).architecture.moe
    assert found is not None and found.experts == 4
    with pytest.raises(ConversionError, match="num_local_experts = 8: contradicts num_experts"):
        bind(raw | {"num_local_experts": 8})


@pytest.mark.parametrize(
    ("rotary_dim", "rope", "refused"),
    [
        (8, {}, None),  # transformers 5.17 writes this
        (8, {"partial_rotary_factor": 0.5}, None),  # and later releases this
        (8, {"partial_rotary_factor": 1.0}, "rotary_dim = 8: contradicts partial_rotary_factor"),
        (24, {}, "rotary_dim = 24: must be a number of channels from 2 to 16"),
        ("8", {}, "rotary_dim = '8': must be a number of channels"),
    ],
)
def test_a_minimax_m2_rotates_its_rotary_dim_whichever_release_wrote_the_config(
    rotary_dim: Any, rope: dict[str, float], refused: str | None
) -> None:
    _, config = PUBLISHED["MiniMax-M2.5 in bf16"]
    parameters = {"rope_theta": 5e6, "rope_type": "default"} | rope
    raw = config | {"head_dim": 16, "rotary_dim": rotary_dim, "rope_parameters": parameters}
    with pytest.raises(ConversionError, match=refused) if refused else nullcontext():
        assert bind(raw).architecture.mixer.rope == Rope(5e6, fraction=0.5)


@pytest.mark.parametrize("family", [f for f in NUMBERED if f in EXPERTS])
def test_layers_for_speculative_decoding_are_passed_over_and_no_others(
    tmp_path: Path, family: str
) -> None:
    table = bind(read_config(edited(tmp_path, family, num_nextn_predict_layers=2)))
    shapes, last = table.hf_shapes(), "model.layers.2."
    ordinary = {name for name in shapes if name.startswith(last)}
    names = {name.removeprefix(last) for name in ordinary} | set(FURTHER)
    extra = {f"model.layers.{layer}.{name}": (1,) for layer in (3, 4) for name in names}
    table.check_hf(shapes | extra, {})
    assert all(table.ignored[name].why for name in extra)
    with pytest.raises(ConversionError, match=r"unexpected: model.layers.5.eh_proj.weight"):
        table.check_hf(shapes | {"model.layers.5.eh_proj.weight": (1,)}, {})
    with pytest.raises(ConversionError, match=r"unexpected: model.layers.2.eh_proj.weight"):
        table.check_hf(shapes | {"model.layers.2.eh_proj.weight": (1,)}, {})


def test_the_layer_of_ernie_that_predicts_a_further_token_is_passed_over(tmp_path: Path) -> None:
    table = bind(read_config(edited(tmp_path, "ernie4_5_moe", num_nextn_predict_layers=1)))
    shapes, first = table.hf_shapes(), "model.layers.0."
    block = {name.replace(first, "model.mtp_block.0.") for name in shapes if first in name}
    own = {f"model.mtp_{name}.0.weight" for name in ("emb_norm", "hidden_norm", "linear_proj")}
    assert len(block) == 9
    extra = dict.fromkeys(block | own, (1,))
    table.check_hf(shapes | extra, {})
    assert all(table.ignored[name].carried for name in extra)
    with pytest.raises(ConversionError, match=r"unexpected: model.mtp_block.1.mlp.up_proj.weight"):
        table.check_hf(shapes | {"model.mtp_block.1.mlp.up_proj.weight": (1,)}, {})


def test_experts_of_transformer_engine_have_the_names_of_those_one_by_one() -> None:
    names = {
        "decoder.layers.1.mlp.experts.linear_fc1.weight12": "local_experts.12.linear_fc1.weight",
        "decoder.layers.1.mlp.experts.linear_fc2.bias0": "local_experts.0.linear_fc2.bias",
    }
    for built, canonical in names.items():
        assert canonical_name(built, 4) == f"decoder.layers.5.mlp.experts.{canonical}"
