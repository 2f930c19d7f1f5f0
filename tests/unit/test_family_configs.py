"""What the config of every family comes to: each field translated, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.plain_values import flatten
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.errors import ConfigError, ConversionError
from tests.families import SAMPLES

SMALL = {
    "vocab_size": 150,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def config_file(path: Path, family: str, **fields: Any) -> Path:
    """A directory whose config.json was made by the config class of `family`."""
    samples = SAMPLES[family]
    own = samples.take_turns(SMALL["num_hidden_layers"])
    own |= samples.tiny if samples.experts else {}
    AutoConfig.for_model(family, **samples.surround(SMALL | own | fields)).save_pretrained(path)
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


@pytest.mark.parametrize("family", SAMPLES)
def test_a_config_is_read_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    for number, (fields, expected) in enumerate(SAMPLES[family].read):
        read = architecture(config_file(tmp_path / str(number), family, **fields))
        flat = flatten(read) | {"uniform_layers": read.uniform_layers}
        assert {name: flat[name] for name in expected} == expected, fields


@pytest.mark.parametrize("family", SAMPLES)
def test_a_config_that_would_change_the_result_is_refused_by_name(
    tmp_path: Path, family: str
) -> None:
    for number, (fields, said) in enumerate(SAMPLES[family].refused):
        path = edited(tmp_path / str(number), family, **fields)
        with pytest.raises(ConversionError) as caught:
            architecture(path)
        assert said in str(caught.value), fields


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "glm4_moe_lite", "ernie4_5_moe"])
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(
    tmp_path: Path, family: str
) -> None:
    config = json.loads((edited(tmp_path, family) / "config.json").read_text())
    config |= {"num_hidden_layers": 10_001, "mlp_layer_types": None, "layer_types": None}
    with pytest.raises(ConversionError, match="10001 layers are more than 10000"):
        bind({name: value for name, value in config.items() if value is not None})


@pytest.mark.parametrize("kinds", [[], ["full_attention"]])
@pytest.mark.parametrize("family", ["qwen3", "olmo3"])
def test_kinds_of_too_few_layers_hide_no_other_mistake(
    tmp_path: Path, family: str, kinds: list[str]
) -> None:
    config = json.loads((edited(tmp_path, family) / "config.json").read_text())
    with pytest.raises(ConversionError) as caught:
        bind(config | {"layer_types": kinds, "hidden_act": "relu"})
    for said in (f"layer_types = {kinds!r}: must name every layer", "hidden_act = 'relu'"):
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
    assert architecture(path).mixer.qkv_bias


def test_every_problem_of_a_config_is_listed_at_once(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama", rope_interleaved=True, hidden_act="relu", one=1, two=2)
    with pytest.raises(ConversionError) as caught:
        architecture(path)
    for said in ("rope_interleaved", "hidden_act", "one = 1", "two = 2"):
        assert said in str(caught.value)


def test_a_relative_that_reads_images_is_refused_with_the_name_of_its_text_part() -> None:
    with pytest.raises(ConversionError, match="phi4_multimodal cannot be converted: it also reads"):
        bind({"model_type": "phi4_multimodal"})


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
