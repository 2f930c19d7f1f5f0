"""`hf_config_overrides`: the model computes as transformers' with the same fields, and what is
written has them.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_policy.batch import BatchedDataDict
from megatron_policy.checkpoint import manifest, tracker
from megatron_policy.cli import app
from megatron_policy.config import PolicyConfig
from megatron_policy.config.model_table import bind_model
from megatron_policy.converters.table import Table
from megatron_policy.errors import CheckpointError, ConfigError, ConversionError
from megatron_policy.formats.manifest import read_manifest
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps, policy_config
from tests.dist.layouts import LAYOUTS, LENGTH
from tests.dist.resuming import paths
from tests.dist.shortcuts import refusal
from tests.exact import Exact, assert_equal

VOCAB = 131
SMALL = {"hidden": 32, "heads": 4, "groups": 2, "layers": 2, "ffn": 40, "vocab": VOCAB}
OVERRIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary base": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "YaRN": (
        "qwen3",
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
            | {"original_max_position_embeddings": 8},
            "max_position_embeddings": 32,
        },
    ),
    "norms and softcaps": ("gemma2", {"rms_norm_eps": 0.1, "final_logit_softcapping": 1.5}),
    "window": ("mistral", {"sliding_window": 3}),
}


def overridden(source: Path, target: Path, overrides: dict[str, Any]) -> Path:
    """A copy of the checkpoint with these values in its config.json."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | overrides))
    return target


def spelled(path: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The overrides in the words of this release of transformers, as which the file was written."""
    own = json.loads((path / "config.json").read_text())
    rope = overrides.get("rope_parameters")
    if rope is None or "rope_parameters" in own:
        return overrides
    rest = {name: value for name, value in overrides.items() if name != "rope_parameters"}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    default = rope["rope_type"] == "default"
    return rest | {"rope_theta": rope["rope_theta"], "rope_scaling": None if default else scaling}


def run(config: dict[str, Any], data: BatchedDataDict, root: Path) -> dict[str, Any]:
    with open_policy(config) as policy:
        tokens = BatchedDataDict({"input_ids": data["input_ids"]})
        read = {"logprobs": policy.logprobs(tokens), "reference": policy.reference_logprobs(tokens)}
        policy.train(own_steps(policy, data)[0], LOSSES["token"](), mbs=1)
        policy.export_hf(root / "exported")
        policy.save_checkpoint(**paths(root / "saved"))
        return read


@pytest.mark.parametrize("layout", ["one process", "TP2+SP", "PP2"])
@pytest.mark.parametrize("name", OVERRIDES)
def test_overridden_fields_count_as_if_they_were_in_the_file(
    ranks, checkpoint, tmp_path, name: str, layout: str
) -> None:
    family, overrides = OVERRIDES[name]
    path = checkpoint(family, **SMALL)
    overrides = spelled(path, overrides)
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    changed = overridden(path, tmp_path / "changed", overrides)
    read = partial(oracle.hf_logprobs, tokens=data["input_ids"])
    expected = Exact.of(changed, read)
    changes = expected.value - Exact.of(path, read).value
    assert changes.abs().max() > 1e-3, "the overrides have no effect"
    config = policy_config(path, LAYOUTS[layout].megatron, hf_config_overrides=overrides)
    for seen in ranks.run(LAYOUTS[layout].world, run, config, data, tmp_path):
        for name, found in seen.items():
            assert_equal(name, found[:, 1:], expected)
    (side,) = tmp_path.glob("saved/**/hf/config.json")
    exported = read_manifest(tmp_path / "exported")
    assert exported is not None and exported.overrides == overrides
    for saved in paths(tmp_path / "saved").values():
        assert manifest.read(tracker.find(saved)).overrides == overrides
    for written in (tmp_path / "exported" / "config.json", side):
        own = json.loads((path / "config.json").read_text())
        assert json.loads(written.read_text()) == own | overrides


def test_a_checkpoint_of_other_overrides_is_refused(ranks, checkpoint, tmp_path) -> None:
    path = checkpoint("gemma2", **SMALL)
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    config = policy_config(path, {}, hf_config_overrides={"final_logit_softcapping": 1.5})
    ranks.run(1, run, config, data, tmp_path)
    load = partial(refusal, **paths(tmp_path / "saved"))
    (said,) = ranks.run(1, load, policy_config(path, {}), CheckpointError)
    assert "policy.hf_config_overrides" in said


REFUSED = {
    "would change weights": {"hidden_size": 64},
    "k_proj.weight": {"num_key_value_heads": 1},
    "lm_head.weight": {"tie_word_embeddings": True},
    "has no rms_norm_epsilon; did you mean rms_norm_eps": {"rms_norm_epsilon": 0.1},
    "model_type cannot be overridden": {"model_type": "llama"},
    "auto_map cannot be overridden": {"auto_map": {"AutoModel": "there.py"}},
    "hf_config_overrides \\(hidden_act\\)": {"hidden_act": "nothing"},
    "layernorm_epsilon must be a positive number, not -1.0": {"rms_norm_eps": -1},
}


def table_of(path: Path, overrides: dict[str, Any] | None) -> Table:
    return bind_model(PolicyConfig.parse(policy_config(path, {}, hf_config_overrides=overrides)))


def test_what_cannot_be_overridden_is_refused_with_the_reason(checkpoint) -> None:
    for message, overrides in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            table_of(checkpoint("qwen3", tied=False, **SMALL), overrides)


def test_a_whole_number_is_taken_where_the_config_has_a_float(checkpoint) -> None:
    table = table_of(checkpoint("qwen3", tied=False, **SMALL), {"rms_norm_eps": 1})
    (value,) = table.overrides.values()
    assert isinstance(value, float) and table.architecture.layernorm_epsilon == 1.0


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a base": ({"rope_theta": 77}, {"rope_theta": 77.0}, {}),
    "a scaling": (
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_type": "yarn", **YARN},
    ),
    "both": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 77.0, **YARN}},
        {"rope_theta": 77.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_type": "yarn", "rope_theta": 77.0, **YARN},
    ),
    "none": ({"rope_scaling": None}, {"rope_scaling": None}, {}),
}
"""Overrides, and what becomes of them for configs of older and newer releases of transformers."""


@pytest.mark.parametrize("newer", [False, True], ids=["older", "newer"])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_settings_can_be_in_the_words_of_any_release(
    checkpoint, tmp_path, name: str, newer: bool
) -> None:
    given, in_older, scaling = ROPES[name]
    config = json.loads((checkpoint("qwen3", **SMALL) / "config.json").read_text())
    own = {"rope_theta": 50.0, "partial_rotary_factor": 1.0}
    config = {n: v for n, v in config.items() if not n.startswith("rope_")}
    config |= {"rope_parameters": {"rope_type": "default", **own}} if newer else own
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = table_of(tmp_path, given)
    base = 50.0 if name in ("a scaling", "none") else 77.0
    whole = {"rope_type": "default"} | own | {"rope_theta": base} | scaling
    whole = given.get("rope_parameters", whole)
    assert table.overrides == ({"rope_parameters": whole} if newer else in_older)
    rope = table.architecture.mixer.rope
    assert rope.base == base and (rope.scaling is not None) == bool(scaling)


def test_a_rotary_embedding_in_both_spellings_is_refused(checkpoint) -> None:
    both = {"rope_scaling": {"type": "yarn", **YARN}, "rope_parameters": {"rope_theta": 77.0}}
    with pytest.raises(ConfigError, match="override that, as a whole, instead of"):
        table_of(checkpoint("qwen3", **SMALL), both)


def test_null_leaves_out_a_field_that_a_family_does_not_know(checkpoint, tmp_path) -> None:
    """The file stays; fields that a family reads still cannot change weights in this way."""
    shutil.copytree(checkpoint("qwen3", **SMALL), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"new_trick": 3}))
    with pytest.raises(ConversionError, match=r"hf_config_overrides \{new_trick: null\}"):
        table_of(file.parent, None)
    assert table_of(file.parent, {"new_trick": None}).overrides == {"new_trick": None}
    with pytest.raises(ConversionError, match="new_trick = 3"):
        table_of(file.parent, {"rms_norm_eps": 0.5})
    with pytest.raises(ConfigError, match="would change weights"):
        table_of(file.parent, {"new_trick": None, "num_key_value_heads": None})


def test_commands_apply_them(checkpoint, tmp_path) -> None:
    file, changed = tmp_path / "policy.yaml", {"hidden_size": 64}
    section = policy_config(checkpoint("qwen3", **SMALL), {}, hf_config_overrides=changed)
    file.write_text(yaml.safe_dump({"policy": section}))
    for command in ("inspect-config", "plan"):
        result = CliRunner().invoke(app, [command, str(file)])
        assert result.exit_code == 2 and "would change weights" in result.stderr.replace("\n", " ")
