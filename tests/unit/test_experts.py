"""Families with experts against real transformers models: names, shapes, configs and bits."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_policy.converters.architecture import Architecture, Rope
from megatron_policy.converters.architecture.traits import Activation, Mla, Moe, QkNorm, Scoring
from megatron_policy.converters.canonical import canonical_name
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.rows import (
    Whole,
    fill_parts,
    fill_shard,
    pack,
    shard,
    unpack,
    unshard,
)
from megatron_policy.converters.rows.expert_rows import StackedWhole
from megatron_policy.converters.table import Table, bind
from megatron_policy.errors import ConversionError
from tests.checkpoints import make_checkpoint
from tests.expert_families import EXPERTS, YARN, draw
from tests.unit.published import COMMON
from tests.unit.published_experts import PUBLISHED_EXPERTS

DRAWS = 4
REPLICATED = (Whole, StackedWhole)
FURTHER = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "embed_tokens.weight")
FURTHER += ("shared_head.norm.weight", "shared_head.head.weight")


@pytest.fixture(scope="module", params=EXPERTS)
def drawn(request, tmp_path_factory) -> list[Path]:
    """Random checkpoints of a family, in bf16 but for the routers' correction biases."""
    return [
        make_checkpoint(
            tmp_path_factory.mktemp(request.param),
            request.param,
            dtype=torch.bfloat16 if seed % 2 else torch.float32,
            tokenizer=False,
            **draw(request.param, seed),
        )
        for seed in range(DRAWS)
    ]


def test_the_table_lists_exactly_the_tensors_of_random_models(drawn: list[Path]) -> None:
    for path in drawn:
        table = bind(read_config(path))
        with HfReader(path) as reader:
            assert table.hf_shapes() == reader.shapes
            table.check_hf(reader.shapes, reader.dtypes)


def test_every_element_comes_back_bit_for_bit_from_shards_of_every_size(drawn: list[Path]) -> None:
    for path in drawn:
        table = bind(read_config(path))
        with HfReader(path) as reader:
            for size in (1, 2):
                back = {
                    name: torch.full_like(reader.tensor(name), torch.nan) for name in reader.shapes
                }
                for entry in table.exported():
                    shards = shards_of(table, entry, reader, size)
                    for rank, piece in enumerate(shards):
                        whole = isinstance(entry.row, REPLICATED)
                        where = (0, 1) if whole else (rank, size)
                        parts = [back[name] for name in entry.hf]
                        fill_parts(entry.row, table.architecture, parts, piece, *where)
                for name, tensor in back.items():
                    assert torch.equal(tensor, reader.tensor(name)), (path, name, size)


def shards_of(table: Table, entry: Any, reader: HfReader, size: int) -> list[torch.Tensor]:
    """The entry's shards in fp32, each element of which must be written."""
    arch, shards = table.architecture, []
    for rank in range(size):
        shards.append(torch.full(entry.row.local_shape(arch, size), torch.nan))
        parts = [reader.part(name) for name in entry.hf]
        fill_shard(entry.row, arch, shards[-1], parts, rank, size)
    return shards


def test_unpack_inverts_pack_and_unshard_shard_for_every_row_of_an_expert(
    drawn: list[Path],
) -> None:
    for path in drawn:
        table = bind(read_config(path))
        arch = table.architecture
        for entry in table.entries:
            parts = [torch.randn(shape) for shape in entry.row.hf_shapes(arch)]
            whole = pack(entry.row, arch, parts)
            assert torch.equal(pack(entry.row, arch, unpack(entry.row, arch, whole)), whole)
            if entry.expert is not None and not isinstance(entry.row, REPLICATED):
                halves = [shard(entry.row, arch, whole, rank, 2) for rank in (0, 1)]
                assert torch.equal(unshard(entry.row, arch, halves), whole)


def test_only_correction_biases_keep_their_dtype(drawn: list[Path]) -> None:
    for path in drawn:
        for entry in bind(read_config(path)).entries:
            assert entry.row.keeps_dtype is entry.megatron.endswith("router.expert_bias")


SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 150,
    "max_position_embeddings": 128,
}


def edited(path: Path, family: str, **fields: Any) -> Path:
    """A small config of the family with fields put in by hand, past its class; None removes one."""
    AutoConfig.for_model(family, **SIZES | EXPERTS[family]).save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return path


def architecture(path: Path, family: str, **fields: Any) -> Architecture:
    return bind(read_config(edited(path, family, **fields))).architecture


def moe(**changes: Any) -> Moe:
    plain = {"experts": 4, "chosen": 2, "ffn_hidden_size": 16, "scoring": Scoring.SOFTMAX}
    return Moe(**plain | changes)


SIGMOID = moe(
    experts=8,
    chosen=3,
    scoring=Scoring.SIGMOID,
    renormalized=True,
    scale=2.5,
    groups=4,
    groups_chosen=2,
    correction_bias=True,
    shared_ffn_hidden_size=16,
)
GATED = moe(shared_ffn_hidden_size=24, shared_gate=True)
ERNIE = moe(
    experts=8,
    chosen=3,
    renormalized=True,
    least_sum=0.6,
    correction_bias=True,
    shared_ffn_hidden_size=32,
)
LATENT = Mla(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10)
OF_CHOSEN = Scoring.SOFTMAX_OF_CHOSEN


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
    found = architecture(tmp_path, family, **fields).moe
    assert found is not None and found.aux_loss_coeff == expected


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        (
            "mixtral",
            {"router_aux_loss_coef": 0.5, "sliding_window": 7},
            {
                "moe": moe(ffn_hidden_size=24, scoring=OF_CHOSEN),
                "moe_layers": (),
                "window": 7,
                "uniform_layers": True,
            },
        ),
        ("qwen2_moe", {}, {"moe": GATED, "moe_layers": (True, False, True), "qkv_bias": True}),
        ("qwen2_moe", {"qkv_bias": False}, {"qkv_bias": False, "qk_norm": QkNorm.NONE}),
        (
            "qwen3_moe",
            {"attention_bias": True},
            {
                "moe": moe(scoring=OF_CHOSEN),
                "moe_layers": (False, True, True),
                "qkv_bias": True,
                "proj_bias": True,
                "mlp_bias": False,
                "uniform_layers": False,
            },
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, {"moe": moe(), "window": None}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, {"moe": None, "moe_layers": ()}),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2, "mlp_only_layers": []},
            {"moe_layers": (False, True, False)},
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "first_k_dense_replace": 2},
            {
                "moe": SIGMOID,
                "mla": LATENT,
                "moe_layers": (False, False, True),
                "kv_channels": 12,
                "num_query_groups": 4,
                "attention_scale": None,
            },
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "rope_parameters": None, "rope_scaling": YARN},
            {"attention_scale": (0.07 * math.log(8) + 1) ** 2 / math.sqrt(12)},
        ),
        (
            "ernie4_5_moe",
            {"num_nextn_predict_layers": 1, "moe_use_aux_free": True},
            {
                "moe": ERNIE,
                "moe_layers": (False, True, True),
                "rope": Rope(5e5, interleaved=True),
                "qkv_bias": False,
                "further_layers": 0,
            },
        ),
        (
            "ernie4_5_moe",
            {"moe_layer_interval": 2, "moe_layer_end_index": 2, "moe_layer_start_index": 0},
            {"moe": ERNIE, "moe_layers": (False, True, False)},
        ),
        (
            "ernie4_5_moe",
            {"moe_layer_end_index": -1, "moe_layer_start_index": 0, "moe_norm_min": 1e-12},
            {"moe": replace(ERNIE, least_sum=1e-12), "moe_layers": ()},
        ),
        ("ernie4_5_moe", {"moe_layer_end_index": 0}, {"moe": None, "moe_layers": ()}),
        (
            "glm4_moe",
            {"first_k_dense_replace": 0, "use_qk_norm": False},
            {"moe": SIGMOID, "moe_layers": (), "qk_norm": QkNorm.NONE, "qkv_bias": True},
        ),
        (
            "glm4_moe_lite",
            {"num_key_value_heads": 4, "mlp_layer_types": ["sparse", "dense", "sparse"]},
            {
                "moe": SIGMOID,
                "mla": LATENT,
                "moe_layers": (True, False, True),
                "kv_channels": 12,
                "num_query_groups": 4,
            },
        ),
        (
            "glm4_moe_lite",
            {"num_key_value_heads": 4, "mlp_layer_types": ["dense"] * 3},
            {"moe": None, "moe_layers": ()},
        ),
        (
            "gpt_oss",
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"rope_type": "default"}},
            {
                "moe": moe(ffn_hidden_size=24, scoring=OF_CHOSEN, router_bias=True),
                "activation": Activation.CLAMPED_SWIGLU,
                "attention_sinks": True,
                "mlp_bias": True,
                "window": 6,
                "windowed": (True, False, True),
            },
        ),
        (
            "minimax_m2",
            {"head_dim": 16, "rotary_dim": 8},
            {
                "moe": moe(
                    experts=8,
                    chosen=3,
                    ffn_hidden_size=24,
                    scoring=Scoring.SIGMOID,
                    renormalized=True,
                    correction_bias=True,
                ),
                "rope": Rope(5e6, fraction=0.5),
                "qk_norm": QkNorm.ALL_HEADS,
                "qkv_bias": False,
            },
        ),
        (
            "olmoe",
            {"attention_bias": True},
            {
                "moe": moe(ffn_hidden_size=24),
                "qk_norm": QkNorm.ALL_HEADS,
                "qkv_bias": True,
                "proj_bias": True,
                "uniform_layers": True,
            },
        ),
        ("olmoe", {"norm_topk_prob": True}, {"moe": moe(ffn_hidden_size=24, scoring=OF_CHOSEN)}),
    ],
)
def test_a_config_is_read_as_transformers_reads_it(
    tmp_path: Path, family: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    read = architecture(tmp_path, family, **fields)
    assert {name: getattr(read, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 experts cannot be chosen from 4"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("qwen3_moe", {"n_routed_experts": 4}, "n_routed_experts = 4: unknown field"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v3", {"topk_group": 5}, "8 experts in 4 groups, 5 of them chosen"),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters = 'DynamicScaling'",
        ),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True: it would add a bias to the output"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval = 0"),
        ("ernie4_5_moe", {"moe_gate": "top2_fused"}, "moe_gate = 'top2_fused'"),
        ("ernie4_5_moe", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
        ("mixtral", {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef = -0.1: must be"),
        ("deepseek_v3", {"aux_loss_alpha": "low"}, "aux_loss_alpha = 'low': must be"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1: must be"),
        ("glm4_moe", {"num_nextn_predict_layers": 1.5}, "num_nextn_predict_layers = 1.5: must be"),
        ("glm4_moe_lite", {"num_key_value_heads": 4, "rope_interleave": False}, "rope_interleave"),
        ("glm4_moe_lite", {"num_key_value_heads": 4, "mlp_layer_types": ["sparse"]}, "every layer"),
        (
            "glm4_moe_lite",
            {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "linear", "sparse"]},
            "mlp_layer_types = 'linear': must be dense or sparse",
        ),
        ("minimax_m2", {"rotary_dim": 24}, "rotary_dim = 24: contradicts partial_rotary_factor"),
        ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list = [1, 0, 1]: every layer"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("glm4_moe", {"index_topk": 4}, "index_topk = 4: unknown field"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_a_config_that_would_change_the_result_is_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConversionError) as caught:
        architecture(tmp_path, family, **fields)
    assert said in str(caught.value)


def test_two_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    raw = read_config(edited(tmp_path, "qwen3_moe")) | {"num_experts": 4, "num_local_experts": 4}
    assert bind(raw).architecture.moe == moe(scoring=OF_CHOSEN)
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
    raw = {
        "model_type": "minimax_m2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-06,
        "num_experts_per_tok": 3,
        "num_local_experts": 8,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "rope_parameters": {"rope_theta": 5000000.0, "rope_type": "default"} | rope,
        "rotary_dim": rotary_dim,
        "tie_word_embeddings": False,
    }
    with pytest.raises(ConversionError, match=refused) if refused else nullcontext():
        assert bind(raw).architecture.rope == Rope(5e6, fraction=0.5)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
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


@pytest.mark.parametrize("name", PUBLISHED_EXPERTS)
def test_a_published_config_gives_the_number_of_parameters_the_model_has(
    tmp_path: Path, name: str
) -> None:
    parameters, config = PUBLISHED_EXPERTS[name]
    (tmp_path / "config.json").write_text(json.dumps(COMMON | config))
    shapes = bind(read_config(tmp_path)).hf_shapes()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters
