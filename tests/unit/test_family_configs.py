"""What the config of every dense family comes to: each field translated, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.rotary import LinearScaling, Llama3Scaling, Rope
from megatron_policy.converters.architecture.traits import Activation, Norm, QkNorm, QueryGrowth
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.errors import ConfigError, ConversionError
from tests.unit.published import LLAMA3
from tests.unit.test_families import SMALL, SOME


def config_file(path: Path, family: str, **fields: Any) -> Path:
    """A directory whose config.json was made by the config class of `family`."""
    AutoConfig.for_model(family, **SMALL | fields).save_pretrained(path)
    return path


def edited(path: Path, family: str, **fields: Any) -> Path:
    """The same with fields put into the file by hand, past the config class; None removes one."""
    config_file(path, family)
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return path


def architecture(path: Path) -> Architecture:
    return bind(read_config(path)).architecture


GROWING = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 64}
OF_OLMO3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"rope": Rope(1e4), "window": None, "tied": False, "kv_channels": 4}),
    ("llama", {"rope_theta": 5e5}, {"rope": Rope(5e5)}),
    (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope": Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))},
    ),
    ("llama", {"attention_bias": True}, {"qkv_bias": True, "proj_bias": True}),
    ("llama", {"mlp_bias": True}, {"qkv_bias": False, "proj_bias": False, "mlp_bias": True}),
    ("llama", {"head_dim": 8}, {"kv_channels": 8}),
    (
        "ministral3",
        {"sliding_window": 4, "rope_parameters": {**GROWING, "llama_4_scaling_beta": 0.1}},
        {"window": 4, "rope": Rope(1e4), "query_growth": QueryGrowth(0.1, 64)},
    ),
    (
        "ministral3",
        {"rope_parameters": {**GROWING, "llama_4_scaling_beta": 0}},
        {"window": None, "query_growth": None},
    ),
    ("mistral", {"sliding_window": 4}, {"window": 4, "windowed": ()}),
    ("mistral", {"sliding_window": None}, {"window": None}),
    ("qwen2", {}, {"qkv_bias": True, "proj_bias": False, "qk_norm": QkNorm.NONE}),
    ("qwen2", {"sliding_window": 4}, {"window": None, "windowed": ()}),
    ("qwen2", SOME, {"window": 4, "windowed": (False, True, True)}),
    ("qwen3", {"head_dim": 4, **SOME, "max_window_layers": 0}, {"window": 4, "windowed": ()}),
    (
        "qwen3",
        {"head_dim": 8},
        {"qk_norm": QkNorm.PER_HEAD, "qkv_bias": False},
    ),
    ("qwen3", {"attention_dropout": 0.1}, {"attention_dropout": 0.1, "kv_channels": 128}),
    ("qwen2", {"rms_norm_eps": 1e-5}, {"layernorm_epsilon": 1e-5, "num_query_groups": 2}),
    ("llama", {"hidden_act": "gelu_new"}, {"activation": Activation.GELU_TANH}),
    (
        "gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 4},
        {
            "attention_scale": 0.25,
            "embedding_scale": 4.0,
            "attention_softcap": 50.0,
            "logit_softcap": 30.0,
            "window": 4,
            "windowed": (True, False, True),
            "norm": Norm.RMS_PLUS_ONE,
            "post_norm": True,
            "activation": Activation.GELU_TANH,
        },
    ),
    (
        "gemma3_text",
        {"head_dim": 8, "layer_types": ["full_attention"] * 3},
        {"window": None, "window_rope": None, "rope": Rope(1e6), "qk_norm": QkNorm.PER_HEAD},
    ),
    (
        "phi3",
        {"resid_pdrop": 0.25, "sliding_window": 5, "pad_token_id": None},
        {"hidden_dropout": 0.25, "embedding_dropout": 0.0, "window": 5},
    ),
    (
        "apertus",
        {"attention_bias": True},
        {
            "rope": Rope(12e6, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
            "activation": Activation.XIELU,
            "gated": False,
            "qk_norm": QkNorm.PER_HEAD,
            "qkv_bias": True,
            "proj_bias": True,
            "mlp_bias": False,
        },
    ),
    (
        "ernie4_5",
        {"use_bias": True, "head_dim": 8},
        {
            "rope": Rope(5e5, interleaved=True),
            "qkv_bias": True,
            "proj_bias": True,
            "mlp_bias": True,
            "kv_channels": 8,
        },
    ),
    (
        "exaone4",
        {"sliding_window": 4, "sliding_window_pattern": 2},
        {
            "window": 4,
            "windowed": (True, False, True),
            "without_rope": (False, True, False),
            "pre_norm": False,
            "post_norm": True,
            "qk_norm": QkNorm.PER_HEAD,
        },
    ),
    (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        {"window": None, "without_rope": ()},
    ),
    (
        "exaone4",
        {"sliding_window": 4, "layer_types": ["full_attention"] * 3},
        {"window": None, "without_rope": (True, True, True)},
    ),
    (
        "glm4",
        {"head_dim": 8, "rope_theta": 5e4},
        {
            "rope": Rope(5e4, fraction=0.5, interleaved=True),
            "pre_norm": True,
            "post_norm": True,
            "qkv_bias": True,
            "proj_bias": False,
        },
    ),
    ("glm4", {"attention_bias": False}, {"qkv_bias": False, "layernorm_epsilon": 1.5625e-7}),
    (
        "granite",
        {
            "attention_multiplier": 0.5,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.25,
        },
        {
            "attention_scale": 0.5,
            "embedding_scale": 12.0,
            "logit_scale": 0.125,
            "residual_scale": 0.25,
        },
    ),
    (
        "hunyuan_v1_dense",
        {
            "head_dim": 8,
            "rope_theta": 1e4,
            "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0, "mscale": 1.0},
        },
        {
            "rope": Rope(1e4 * 1000.0 ** (8 / 6)),
            "qk_norm": QkNorm.AFTER_ROTATION,
            "qkv_bias": False,
        },
    ),
    ("hunyuan_v1_dense", {"head_dim": 8, "rope_theta": 5e4}, {"rope": Rope(5e4)}),
    ("olmo2", {}, {"pre_norm": False, "post_norm": True, "qk_norm": QkNorm.ALL_HEADS}),
    (
        "olmo3",
        {
            "sliding_window": 4,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            "rope_parameters": OF_OLMO3,
        },
        {
            "window": 4,
            "windowed": (True, True, False),
            "rope": Rope(5e5, LinearScaling(8.0)),
            "window_rope": Rope(1e4),
            "qk_norm": QkNorm.ALL_HEADS,
            "pre_norm": False,
            "post_norm": True,
        },
    ),
    ("olmo3", {"layer_types": ["full_attention"] * 3}, {"window": None, "window_rope": None}),
    (
        "seed_oss",
        {"head_dim": 8, "residual_dropout": 0.2, "attention_dropout": 0.3},
        {
            "qkv_bias": True,
            "proj_bias": False,
            "mlp_bias": False,
            "hidden_dropout": 0.2,
            "embedding_dropout": 0.0,
            "attention_dropout": 0.3,
        },
    ),
    (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 4,
            "pad_token_id": None,
        },
        {"without_rope": (False, True, False), "window": 4, "windowed": (False, True, False)},
    ),
    (
        "starcoder2",
        {"residual_dropout": 0.1, "embedding_dropout": 0.2, "use_bias": False},
        {
            "hidden_dropout": 0.1,
            "embedding_dropout": 0.2,
            "gated": False,
            "norm_bias": True,
            "mlp_bias": False,
        },
    ),
    (
        "cohere",
        {"logit_scale": 0.5, "use_qk_norm": True, "rope_theta": 8e6},
        {
            "logit_scale": 0.5,
            "qk_norm": QkNorm.EACH_HEAD,
            "parallel": True,
            "norm_bias": False,
            "rope": Rope(8e6, interleaved=True),
        },
    ),
]


@pytest.mark.parametrize(("family", "fields", "expected"), READ)
def test_a_config_is_read_as_transformers_reads_it(
    tmp_path: Path, family: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    read = architecture(config_file(tmp_path, family, **fields))
    assert {name: getattr(read, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        (
            "llama",
            {"hidden_act": "relu"},
            "hidden_act = 'relu': the MLP's activation can be silu, swish, ",
        ),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping = 5.0"),
        ("phi3", {"attention_bias": True, "pad_token_id": None}, "attention_bias = True"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act = 'silu': the table has rows for the"),
        ("apertus", {"qk_norm": False}, "qk_norm = False"),
        ("apertus", {"post_norm": True}, "post_norm = True"),
        ("ernie4_5", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("ernie4_5", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("exaone4", {"attention_bias": True}, "attention_bias = True: unknown field"),
        ("glm4", {"mlp_bias": True}, "mlp_bias = True: unknown field"),
        ("granite", {"num_local_experts": 8}, "num_local_experts = 8: unknown field"),
        ("hunyuan_v1_dense", {"head_dim": 8, "use_cla": True}, "use_cla = True"),
        ("hunyuan_v1_dense", {"head_dim": 8, "use_qk_norm": False}, "use_qk_norm = False"),
        ("hunyuan_v1_dense", {"head_dim": 8, "mlp_bias": True}, "mlp_bias = True"),
        (
            "hunyuan_v1_dense",
            {
                "head_dim": 8,
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "alpha": 9.0,
                },
            },
            "rope_parameters.alpha = 9.0: needs rope_type dynamic",
        ),
        (
            "ministral3",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 0.5,
                    "llama_4_scaling_beta": 0.1,
                }
            },
            "original_max_position_embeddings = 0.5: must be a positive integer",
        ),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv = 8.0: unknown field"),
        ("olmo3", {"clip_qkv": 8.0}, "clip_qkv = 8.0: unknown field"),
        (
            "seed_oss",
            {"attention_bias": False, "attention_out_bias": True},
            "attention_out_bias = True: Megatron-Core has it only with attention_bias",
        ),
        ("cohere", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef = 0.1: unknown field"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ("qwen2", {"use_mrope": True}, "use_mrope = True"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "no model family 'ministral'"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types = 'sliding_attention': needs use_sliding_window",
        ),
        ("qwen2", {"architectures": ["Qwen2ForQuestionAnswering"]}, "Qwen2ForCausalLM"),
    ],
)
def test_a_config_that_would_change_the_result_is_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], said: str
) -> None:
    path = edited(tmp_path, family, **fields)
    with pytest.raises(ConversionError) as caught:
        architecture(path)
    assert said in str(caught.value)


def test_a_config_with_everything_transformers_itself_adds_is_translated(tmp_path: Path) -> None:
    path = edited(
        tmp_path,
        "qwen2",
        use_mrope=False,
        torch_dtype="bfloat16",
        temperature=0.7,
        eos_token_id=[1, 2],
        max_length=64,
        transformers_version="4.40.0",
    )
    assert architecture(path).qkv_bias


def test_every_problem_of_a_config_is_listed_at_once(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama", rope_interleaved=True, hidden_act="relu", one=1, two=2)
    with pytest.raises(ConversionError) as caught:
        architecture(path)
    for said in ("rope_interleaved", "hidden_act", "one = 1", "two = 2"):
        assert said in str(caught.value)


@pytest.mark.parametrize("model_type", ["gemma3", "phi4_multimodal"])
def test_a_relative_that_reads_images_is_refused_with_the_name_of_its_text_part(
    model_type: str,
) -> None:
    with pytest.raises(ConversionError, match=rf"{model_type} cannot be converted: it also reads"):
        bind({"model_type": model_type})


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("granite", {"logits_scaling": 0}),
        ("granite", {"embedding_multiplier": float("nan")}),
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("gemma2", {"query_pre_attn_scalar": -3}),
        ("gemma2", {"attn_logit_softcapping": -1.0}),
        ("gemma2", {"final_logit_softcapping": 0.0}),
        ("llama", {"num_hidden_layers": 10**9}),
        ("llama", {"rms_norm_eps": float("inf")}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}),
        ("smollm3", {"no_rope_layers": [1]}),
    ],
)
def test_numbers_that_no_model_can_have_are_one_error(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    path = edited(tmp_path, family, **fields)
    with pytest.raises(ValueError) as caught:  # of ours, or of transformers as a ConfigError
        bind(read_config(path))
    assert isinstance(caught.value, ConversionError | ConfigError), caught.value


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8', not a section of fields"),
        ({"torch_dtype": "float8"}, "torch_dtype: 'float8' is not the name of a dtype of tensors"),
        ({"dtype": 16}, "dtype: 16 is not the name of a dtype of tensors"),
    ],
)
def test_a_field_at_which_transformers_fails_is_named(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"} | fields))
    with pytest.raises(ConfigError, match=f"cannot be read: {said}"):
        read_config(tmp_path)


@pytest.mark.parametrize(("kind", "known_as"), [("qwen2", "qwen2"), ("kimi_k2", "deepseek_v3")])
def test_a_family_that_is_newer_than_transformers_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, known_as: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    monkeypatch.setattr("transformers.CONFIG_MAPPING", {})
    with pytest.raises(ConfigError, match=f"no models of the type '{known_as}'.*install a newer"):
        read_config(tmp_path)
