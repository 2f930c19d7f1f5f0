"""Directories that PEFT writes: what is taken, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.peft_files import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    BASE,
    check_peft_config,
    write_peft,
)
from megatron_policy.errors import ConfigError, ConversionError

TENSORS = {
    f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.randn(shape)
    for layer in (0, 1)
    for side, shape in (("A", (4, 8)), ("B", (6, 4)))
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "adapters"
    write_peft(
        path,
        TENSORS,
        rank=4,
        alpha=8.0,
        dropout=0.1,
        model="some/model",
        base="5eed",
        overwrite=False,
    )
    return path


def changed(path: Path, name: str, **values: Any) -> None:
    content = json.loads((path / name).read_text(encoding="utf-8"))
    (path / name).write_text(json.dumps(content | values), encoding="utf-8")


def test_what_is_written_is_read_again_and_says_what_it_is(written: Path) -> None:
    check_peft_config(written, 4, 8.0, "5eed")
    with HfReader(written, ADAPTER_MODEL) as reader:
        assert reader.shapes.keys() == TENSORS.keys()
        assert all(torch.equal(reader.tensor(name), each) for name, each in TENSORS.items())
    config = json.loads((written / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    assert config["target_modules"] == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.1)


def test_an_existing_directory_is_kept_unless_it_shall_be_replaced(written: Path) -> None:
    other: dict[str, Any] = {"rank": 1, "alpha": 1.0, "dropout": 0.0, "model": "", "base": "0ther"}
    with pytest.raises(ConfigError, match="exists"):
        write_peft(written, {}, **other, overwrite=False)
    check_peft_config(written, 4, 8.0, "5eed")
    write_peft(written, {}, **other, overwrite=True)
    check_peft_config(written, 1, 1.0, "0ther")


@pytest.mark.parametrize(
    ("name", "values", "error", "said"),
    [
        (ADAPTER_CONFIG, {"peft_type": "IA3"}, ConversionError, "has 'IA3' adapters, not 'LORA'"),
        (ADAPTER_CONFIG, {"use_dora": True}, ConversionError, "use_dora=True, which is not"),
        (ADAPTER_CONFIG, {"rank_pattern": {"q": 2}}, ConversionError, "rank_pattern={'q': 2}"),
        (ADAPTER_CONFIG, {"init_lora_weights": "pissa"}, ConversionError, "changes the base"),
        (ADAPTER_CONFIG, {"bias": "all"}, ConversionError, "bias='all'"),
        (ADAPTER_CONFIG, {"modules_to_save": ["lm_head"]}, ConversionError, "modules_to_save="),
        (ADAPTER_CONFIG, {"r": 8}, ConfigError, "peft.dim is 4, but .* have r=8: set it to that"),
        (ADAPTER_CONFIG, {"lora_alpha": 1}, ConfigError, "peft.alpha is 8.0, but .* lora_alpha=1"),
        (ADAPTER_CONFIG, {"target_parameters": ["w"]}, ConfigError, "adapters of 'w', unlike"),
        (ADAPTER_CONFIG, {"target_parameters": 3}, ConfigError, "adapters of '3', unlike"),
        (BASE, {"digest": "0ther"}, ConfigError, "'some/model', which has other weights than"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_would_compute_something_else_is_refused(
    written: Path, name: str, values: dict[str, Any], error: type[Exception], said: str
) -> None:
    changed(written, name, **values)
    with pytest.raises(error, match=said):
        check_peft_config(written, 4, 8.0, "5eed")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 4, "r": 4}'])
def test_a_damaged_config_is_named(written: Path, text: str) -> None:
    (written / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    with pytest.raises(ConversionError, match=ADAPTER_CONFIG):
        check_peft_config(written, 4, 8.0, "5eed")


def test_a_directory_without_adapters_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_pretrained or export_peft wrote"):
        check_peft_config(tmp_path, 4, 8.0, "5eed")


STACKS = [f"model.layers.{layer}.mlp.experts.down_proj" for layer in (0, 1)]


def test_parameters_of_experts_are_named_whole_or_by_their_ends(tmp_path: Path) -> None:
    path, at = tmp_path / "adapters", "base_model.model.model.layers.{}.mlp.experts.{}lora_A.weight"
    insides = ("", "base_layer.")
    tensors = {at.format(n, inside): torch.zeros(4, 2) for n in (0, 1) for inside in insides}
    own: dict[str, Any] = {"rank": 4, "alpha": 8.0, "dropout": 0.1, "model": "", "base": "5eed"}
    write_peft(path, TENSORS | tensors, **own, overwrite=False, parameters=STACKS)
    check_peft_config(path, 4, 8.0, "5eed", parameters=STACKS)
    config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    assert config["target_modules"] == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    assert (config["target_parameters"], config["lora_dropout"]) == (STACKS, 0.0)
    changed(path, ADAPTER_CONFIG, target_parameters=["experts.down_proj"])
    check_peft_config(path, 4, 8.0, "5eed", parameters=STACKS)
    for other in (STACKS[:1], ["experts.gate_up_proj"], ["xperts.down_proj"], None):
        changed(path, ADAPTER_CONFIG, target_parameters=other)
        with pytest.raises(ConfigError, match=r"no adapters of model.layers.*set target_modules"):
            check_peft_config(path, 4, 8.0, "5eed", parameters=STACKS)


def test_a_head_that_is_trained_in_full_is_taken_for_a_model_that_has_one(written: Path) -> None:
    assert not check_peft_config(written, 4, 8.0, "5eed", scalar_head=True)
    changed(written, ADAPTER_CONFIG, modules_to_save=["classifier", "score"])
    assert check_peft_config(written, 4, 8.0, "5eed", scalar_head=True)
    for other in (["score", "lm_head"], "score", [{"score": 1}], {"score": 1}):
        changed(written, ADAPTER_CONFIG, modules_to_save=other)
        with pytest.raises(ConversionError, match="merge them into their base"):
            check_peft_config(written, 4, 8.0, "5eed", scalar_head=True)
