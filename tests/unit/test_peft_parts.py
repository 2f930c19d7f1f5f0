"""Directories of PEFT with adapters of stacked experts, or with a scalar head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_policy.converters.adapters import (
    adapters_on,
    stacked_parameters,
    target_parameters,
)
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.peft_files import ADAPTER_CONFIG, read_peft
from megatron_policy.converters.table import Table, bind
from megatron_policy.errors import ConversionError
from tests.unit.test_peft_files import (
    MODULE,
    SHAPES,
    SPEC,
    changed,
    table,
    write_peft,
    written,
)

__all__ = ["table", "written"]


@pytest.fixture(scope="module")
def stacked(checkpoint) -> tuple[list[str], Table]:
    """The parameters with stacked experts, and the table of adapters of these and of `MODULE`."""
    model = bind(read_config(checkpoint("gpt_oss")))
    parameters, modules = stacked_parameters(model), [MODULE.format(layer) for layer in (0, 1)]
    return parameters, adapters_on(model, 4, modules, lambda _: False, parameters)


def test_parameters_of_experts_are_named_whole_or_by_their_ends(
    tmp_path: Path, stacked: tuple[list[str], Table]
) -> None:
    parameters, adapters = stacked
    path, shapes = write_peft(tmp_path / "adapters", SPEC, adapters), adapters.hf_shapes()
    config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    assert config["target_modules"] == [MODULE.format(layer) for layer in (0, 1)]
    assert config["target_parameters"] == sorted(parameters) == target_parameters(adapters)
    assert config["lora_dropout"] == 0.0
    ends = ["experts.down_proj", "gate_up_proj"]
    for named in (parameters, ends):
        changed(path, ADAPTER_CONFIG, target_parameters=named)
        found = read_peft(path)
        assert found.parameters(parameters, "here") == parameters
        assert found.uniform(shapes, parameters) == (4, 8.0)
        assert list(found.modules(shapes, parameters)) == config["target_modules"]
    changed(path, ADAPTER_CONFIG, target_parameters=["experts.down_proj"])
    assert all(name.endswith("down_proj") for name in read_peft(path).parameters(parameters, ""))
    for other in (["experts.gate_proj"], ["xperts.down_proj"], [*ends, "w"]):
        changed(path, ADAPTER_CONFIG, target_parameters=other)
        with pytest.raises(ConversionError, match=f"{other[-1]}; here has no such tensors"):
            read_peft(path).parameters(parameters, "here")
    with pytest.raises(ConversionError, match="does not name them"):
        read_peft(path).uniform(shapes)


def test_stacked_experts_of_another_scale_than_the_modules_are_named(
    tmp_path: Path, stacked: tuple[list[str], Table]
) -> None:
    parameters, adapters = stacked
    path, shapes = write_peft(tmp_path / "adapters", SPEC, adapters), adapters.hf_shapes()
    for patterns in ({"alpha_pattern": {"down_proj": 3.0}}, {"rank_pattern": {"down_proj": 2}}):
        changed(path, ADAPTER_CONFIG, **patterns)
        with pytest.raises(ConversionError, match=r"for .*down_proj, but a policy's are all alike"):
            read_peft(path).uniform(shapes, parameters)
        changed(path, ADAPTER_CONFIG, alpha_pattern={}, rank_pattern={})


def test_a_head_that_is_trained_in_full_comes_with_the_adapters(written: Path) -> None:
    head = {"base_model.model.score.weight": (1, 8)}
    with pytest.raises(ConversionError, match=r"has base_model.model.score.weight; only linear"):
        read_peft(written).uniform(SHAPES | head)
    assert not read_peft(written).settings.of_head
    changed(written, ADAPTER_CONFIG, modules_to_save=["classifier", "score"])
    found = read_peft(written)
    assert found.uniform(SHAPES | head) == (4, 8.0) and found.settings.has_head
    changed(written, ADAPTER_CONFIG, modules_to_save=None, task_type="SEQ_CLS")
    found = read_peft(written)
    assert found.settings.of_head and not found.settings.has_head
