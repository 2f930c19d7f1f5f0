"""Configs field by field, and which family reads them."""

from __future__ import annotations

import json
import re

import pytest
import torch

from megatron_policy.convert.headers import read_headers
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.registry import FAMILIES, family_of
from megatron_policy.converters.table import bind, draft
from megatron_policy.errors import ConversionError
from tests.pure.test_table import raw, small

UNKNOWN = (
    "unknown field; if it does not affect the model, {} leaves it out and the file as it is (in a "
    "family of yours: take, expect or ignore it)"
)


def test_an_unknown_model_type_names_those_there_are_and_the_nearest() -> None:
    with pytest.raises(ConversionError) as caught:
        family_of("qwen22")
    for said in (*FAMILIES, "did you mean qwen2?", "megatron_policy.models"):
        assert said in str(caught.value)


def test_an_installed_package_can_add_a_family(tmp_path, monkeypatch) -> None:
    (tmp_path / "added-1.0.dist-info").mkdir()
    (tmp_path / "added-1.0.dist-info" / "METADATA").write_text("Name: added\nVersion: 1.0\n")
    (tmp_path / "added-1.0.dist-info" / "entry_points.txt").write_text(
        "[megatron_policy.models]\nminiature = added_family:FAMILY\nbroken = added_family:TYPE\n"
    )
    (tmp_path / "added_family.py").write_text(
        "from megatron_policy.converters.registry import FAMILIES, Family\n"
        "TYPE = Family\n"
        "q = FAMILIES['qwen2']\n"
        "FAMILY = Family('miniature', q.table, q.architecture, ('MiniatureForCausalLM',))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    table = bind(
        raw("qwen2") | {"model_type": "miniature", "architectures": ["MiniatureForCausalLM"]}
    )
    assert table.family == "miniature" and table.hf_shapes() == small().hf_shapes()
    with pytest.raises(ConversionError, match="is not a Family"):
        family_of("broken")
    with pytest.raises(ConversionError, match=r"known are .*broken, .*llama, .*miniature, "):
        family_of("nothing")


def test_every_field_is_taken_ignored_or_named_and_told_once() -> None:
    fields = Fields(
        {
            "width": 8,
            "heads": None,
            "kind": "b",
            "odd": "no",
            "mark": 1,
            "use_cache": True,
            "late": 3,
            "nothing": None,
            "rope": {"base": 5, "deep": {"x": 1}, "rest": 2},
        }
    )
    assert fields.take("width") == 8 and fields.take("heads", 4) == 4
    fields.expect("kind", ("a", "b"), "one of two")
    fields.expect("odd", ("yes",), "it must be")
    fields.refuse("odd", "no", "for another reason")
    fields.ignore("mark", "only a mark")
    rope = fields.section("rope")
    assert rope.take("base") == 5 and rope.section("deep").take("x") == 1
    told = {use.name: (use.outcome, use.why) for use in fields.uses()}
    assert told == {
        "width": ("translated", ""),
        "heads": ("translated", "taken as 4"),
        "kind": ("translated", "one of two"),
        "odd": ("refused", "it must be; it can be 'yes'; for another reason"),
        "mark": ("ignored", "only a mark"),
        "use_cache": ("ignored", "how Hugging Face generates"),
        "late": ("refused", UNKNOWN.format("hf_config_overrides {late: null}")),
        "nothing": ("ignored", "null"),
        "rope.base": ("translated", ""),
        "rope.deep.x": ("translated", ""),
        "rope.rest": (
            "refused",
            UNKNOWN.format("a whole rope without it in hf_config_overrides"),
        ),
    }
    early = {use.name: (use.outcome, use.why) for use in fields.uses("the end came")}
    changed = {name for name in told if told[name] != early[name]}
    assert changed == {"late", "rope.rest"}
    assert {early[name] for name in changed} == {("unread", "the end came")}
    with pytest.raises(ConversionError) as caught:
        fields.finish({"late": "harmless"})
    said = str(caught.value)
    named = set(re.findall(r"\n  (\S+ = .*?): ", said))
    assert named == {"odd = 'no'", "rope.rest = 2", "use_cache = True"}
    assert "odd = 'no': it must be; it can be 'yes'" in said
    assert "rope.rest = 2: unknown field" in said


def test_a_long_value_is_cut_in_messages() -> None:
    fields = Fields({"layers": list(range(1000))})
    with pytest.raises(ConversionError) as caught:
        fields.finish()
    assert "layers = [0, 1, 2," in str(caught.value) and len(str(caught.value)) < 400


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
DYNAMIC = FP8 | {"activation_scheme": "dynamic", "fmt": "e4m3"}


@pytest.mark.parametrize(
    "section",
    [
        DYNAMIC,  # DeepSeek-V3 and R1, Kimi-K2
        DYNAMIC | {"scale_fmt": "ue8m0"},
        FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"]},
        FP8 | {"ignored_layers": ["gate"], "expert_dtype": "fp8", "dequantize": False},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    ],
)
def test_a_published_quantisation_is_ignored_because_weights_are_read_as_bfloat16(section) -> None:
    assert small(quantization_config=section).hf_shapes() == small().hf_shapes()
    (use,) = Fields({"quantization_config": section}).uses()
    assert (use.outcome, use.why) == ("ignored", "the quantised weights are read as bfloat16")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised to gptq (4 bits)"),
        ({"quant_method": "awq"}, "awq; quantised weights of this method cannot be converted"),
        ({"quant_method": "compressed-tensors"}, "dequantise it with the tool that made it"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised to bitsandbytes"),
        ({"quant_method": "mxfp4", "bits": 4}, "its field bits = 4 is not known"),
        (FP8 | {"fmt": "e5m2"}, "its fmt is 'e5m2', and only 'e4m3' or"),
        (FP8 | {"weight_block_size": None}, "its weight_block_size is None"),
        (FP8 | {"weight_block_size": [128, 0]}, "its weight_block_size is [128, 0]"),
        (FP8 | {"weight_block_size": [128]}, "its weight_block_size is [128]"),
        (FP8 | {"expert_dtype": "fp4"}, "its expert_dtype is 'fp4'"),
        (FP8 | {"scale_fmt": "other"}, "its scale_fmt is 'other'"),
        ("surprise", "quantised to 'surprise'"),
    ],
)
def test_a_quantised_config_is_refused_by_its_method_whatever_else_it_says(section, said) -> None:
    with pytest.raises(ConversionError, match=re.escape(said)):
        small(quantization_config=section)


def test_the_newer_spelling_of_the_rope_has_the_last_word() -> None:
    newer = {"rope_type": "default", "rope_theta": 5e5}
    assert small("llama", rope_parameters=newer).architecture.mixer.rope.base == 5e5
    with pytest.raises(ConversionError, match="rope_scaling = "):
        small("llama", rope_parameters=newer, rope_scaling={"rope_type": "default"})


def test_a_field_that_is_needed_and_absent_and_a_class_of_another_task_are_named() -> None:
    fields = raw("llama")
    del fields["rms_norm_eps"]
    with pytest.raises(ConversionError, match="no rms_norm_eps"):
        bind(fields)
    with pytest.raises(ConversionError, match=r"ForQuestionAnswering.*Qwen2ForCausalLM"):
        small(architectures=["Qwen2ForQuestionAnswering"])


MARKS = {
    "unsloth_fixed": True,
    "unsloth_version": "2025.3.1",
    "model_max_length": 32768,
    "use_flash_attn": True,
    "torch_dtype": "torch.bfloat16",
}


def test_marks_of_tools_do_not_keep_a_config_from_being_read(checkpoint, tmp_path) -> None:
    written = json.loads((checkpoint("llama") / "config.json").read_text())
    written.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(written | MARKS))
    read = read_config(tmp_path)
    assert bind(read).architecture == bind(read_config(checkpoint("llama"))).architecture
    draft(fields := Fields(read))
    ignored = {use.name for use in fields.uses() if use.outcome == "ignored"}
    assert ignored > MARKS.keys() - {"torch_dtype"}
    dtypes = set(read_headers(tmp_path / "config.json").dtypes.values())
    assert dtypes == {torch.bfloat16}
