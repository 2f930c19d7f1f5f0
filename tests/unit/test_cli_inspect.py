"""`inspect` shows all of a checkpoint, and names both sides of whatever does not match."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from tests.families import DENSE

Change = Callable[[dict[str, torch.Tensor]], None]
UP = "model.layers.2.mlp.up_proj.weight"


def inspect(path: Path, *options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", str(path), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr


def edited(source: Path, path: Path, change: Change | None = None, **fields: Any) -> Path:
    """A copy of a checkpoint with other tensors, and with other fields in its config."""
    shutil.copytree(source, path)
    if change is not None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    return path


@pytest.mark.parametrize("family", DENSE)
def test_every_weight_and_field_of_a_family_is_shown(checkpoint, family: str) -> None:
    path = checkpoint(family)
    table = bind(read_config(path))
    code, said, errors = inspect(path, "--all")
    assert (code, errors) == (0, "")
    words = set(said.split())
    assert {entry.megatron for entry in table.entries} <= words
    assert set(table.hf_shapes()) <= words
    written = json.loads((path / "config.json").read_text())
    assert set(written) <= {word.split(".")[0] for word in words}
    assert "0 without their tensors" in said and "0 unmatched" in said
    assert "refused" not in said and "unread" not in said


def test_layers_that_are_alike_are_one_line_with_their_numbers(checkpoint) -> None:
    code, said, _ = inspect(checkpoint("qwen2", vocab=250))
    assert code == 0
    (qkv,) = (line for line in said.splitlines() if "linear_qkv.weight" in line)
    name = "decoder.layers.{layer}.self_attention.linear_qkv.weight"
    assert qkv == f"  {name}  [128, 64]  Qkv, split along dimension 0  layers 0-3"
    assert "model.layers.{layer}.self_attn.k_proj.weight  [32, 64]  float32" in said
    assert "embedding.word_embeddings.weight  [250, 64] + 6 rows of padding" in said


def test_machines_get_all_of_it(checkpoint) -> None:
    code, said, _ = inspect(checkpoint("llama", tied=True), "--json")
    report = json.loads(said)
    assert code == 0 and report["family"] == "llama" and report["problems"] == []
    table = bind(read_config(checkpoint("llama", tied=True)))
    assert len(report["weights"]) == len(table.entries)
    fields = {field["name"]: field for field in report["fields"]}
    assert fields["num_hidden_layers"] | {"why": ""} == {
        "name": "num_hidden_layers",
        "value": 4,
        "outcome": "translated",
        "why": "",
    }
    assert fields["initializer_range"]["outcome"] == "ignored"


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[UP]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.adapter"] = torch.zeros(3)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = tensors[UP][1:].clone()


def round_down(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = tensors[UP].to(torch.int32)


@pytest.mark.parametrize(
    ("change", "marked", "named"),
    [
        (drop, "<< missing", f"missing: {UP} [128, 64], which feeds decoder.layers.2.mlp."),
        (add, "no row of qwen2 uses it", "unexpected: model.layers.2.mlp.up_proj.adapter [3]"),
        (reshape, "<< is [127, 64]", f"misshapen: {UP} is [127, 64], must be [128, 64]; it feeds"),
        (round_down, "int32  << of a dtype", f"dtype: {UP} is int32; it feeds decoder.layers.2"),
    ],
)
def test_what_does_not_match_is_marked_and_named_on_both_sides(
    checkpoint, tmp_path: Path, change: Change, marked: str, named: str
) -> None:
    code, said, errors = inspect(edited(checkpoint("qwen2"), tmp_path / "bad", change))
    assert code == 1 and errors.startswith("error: ") and errors.count("\n") == 1
    assert marked in said and named in errors
    # The whole table all the same: the others are there, and the config is.
    assert "layers 0-1, 3" in said or change is add
    assert "output_layer.weight" in said and "num_hidden_layers = 4" in said


def test_a_refused_field_is_marked_and_the_weights_are_shown_all_the_same(
    checkpoint, tmp_path: Path
) -> None:
    path = edited(checkpoint("qwen2"), tmp_path / "bad", hidden_act="relu", new_trick=3)
    code, said, errors = inspect(path)
    assert code == 1 and "hidden_act = 'relu'" in errors and "new_trick = 3" in errors
    assert "  refused     hidden_act = 'relu': " in said
    assert "  refused     new_trick = 3: unknown field" in said
    assert "decoder.layers.{layer}.mlp.linear_fc1.weight" in said


def test_a_config_that_ends_the_translation_shows_how_far_it_came(
    checkpoint, tmp_path: Path
) -> None:
    path = edited(checkpoint("qwen2"), tmp_path / "bad", num_key_value_heads=3)
    code, said, errors = inspect(path)
    assert code == 1 and errors.count("\n") == 1
    assert "translated  num_key_value_heads = 3" in said
    assert f"{UP}  [128, 64]  float32: what it feeds is unknown without the config" in said


FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def to_fp8(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    tensors[f"{UP}_scale_inv"] = torch.ones(1, 1)


def test_fp8_weights_are_shown_as_they_are_read(checkpoint, tmp_path: Path) -> None:
    path = edited(checkpoint("qwen2"), tmp_path / "c", to_fp8, quantization_config=FP8)
    code, said, errors = inspect(path)
    assert (code, errors) == (0, "") and "scale_inv" not in said
    assert f"{UP}  [128, 64]  bfloat16" in said or "up_proj.weight  [128, 64]  bfloat16" in said
    assert "quantization_config = {" in said
    assert "ignored" in said and "the quantised weights are read as bfloat16" in said


def test_fp8_weights_that_are_not_read_are_refused_by_name_with_what_to_do(
    checkpoint, tmp_path: Path
) -> None:
    static = FP8 | {"activation_scheme": "static"}
    by_config = edited(checkpoint("qwen2"), tmp_path / "c", to_fp8, quantization_config=static)
    by_tensors = edited(checkpoint("qwen2"), tmp_path / "t", to_fp8)
    found = f"fp8 (e4m3): 1 tensors, the first {UP}, with block scales in 1, the first"
    for command, path, named in (
        ("inspect", by_config, "fp8 (e4m3, blocks 128 x 128)"),
        ("inspect", by_config, "its activation_scheme is 'static', and only 'dynamic' is read"),
        ("parity", by_config, "fp8 (e4m3, blocks 128 x 128)"),
        ("inspect", by_tensors, found),
        ("inspect", by_tensors, "put it back as published"),
    ):
        result = CliRunner().invoke(app, [command, str(path)])
        assert result.exit_code == 1
        assert named in result.stderr and result.stderr.count("\n") == 1
        assert "FineGrainedFP8Config(dequantize=True)" in result.stderr


def test_a_quantised_checkpoint_is_no_reference_for_parity(checkpoint, tmp_path: Path) -> None:
    path = edited(checkpoint("qwen2"), tmp_path / "c", to_fp8, quantization_config=FP8)
    result = CliRunner().invoke(app, ["parity", str(path)])
    assert result.exit_code == 2
    assert "convert it to Megatron-Core's format and back" in result.stderr


def test_an_architecture_nobody_knows_is_one_line_with_those_there_are(
    checkpoint, tmp_path: Path
) -> None:
    for model_type in ("unheard-of", "gpt2"):
        path = edited(checkpoint("qwen2"), tmp_path / model_type, model_type=model_type)
        code, said, errors = inspect(path)
        assert (code, said) == (1, "") and errors.count("\n") == 1
        for name in (f"'{model_type}'", "llama", "qwen3", "megatron_policy.models"):
            assert name in errors


@pytest.mark.parametrize(
    ("damage", "exits"),
    [("no config", 2), ("no weights", 1), ("truncated", 1), ("not json", 2), ("nowhere", 2)],
)
def test_damage_is_one_line(checkpoint, tmp_path: Path, damage: str, exits: int) -> None:
    path = edited(checkpoint("qwen2"), tmp_path / "bad")
    if damage == "no config":
        (path / "config.json").unlink()
    elif damage == "no weights":
        (path / "model.safetensors").unlink()
    elif damage == "truncated":
        whole = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(whole[:-1])
    elif damage == "not json":
        (path / "config.json").write_text("{")
    else:
        shutil.rmtree(path)
    code, said, errors = inspect(path)
    assert (code, said) == (exits, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1 and str(path) in errors


@pytest.fixture(scope="module")
def mcore(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied checkpoint in Megatron-Core's format."""
    path = tmp_path_factory.mktemp("converted") / "mcore"
    result = CliRunner().invoke(
        app, ["convert", str(checkpoint("qwen3", vocab=250)), str(path), "--to", "mcore"]
    )
    assert result.exit_code == 0, result.output
    return path


def with_config(mcore: Path, path: Path, **fields: Any) -> Path:
    shutil.copytree(mcore, path)
    config = json.loads((path / "hf" / "config.json").read_text())
    (path / "hf" / "config.json").write_text(json.dumps(config | fields))
    return path


def test_a_megatron_checkpoint_shows_the_same_weights_as_the_one_it_came_from(
    checkpoint, mcore: Path
) -> None:
    code, said, errors = inspect(mcore)
    assert (code, errors) == (0, "")
    _, before, _ = inspect(checkpoint("qwen3", vocab=250))
    weights, _, _ = said.partition("config.json")
    assert weights == before.partition("config.json")[0]


@pytest.mark.parametrize(
    ("fields", "marked", "named"),
    [
        (
            {"tie_word_embeddings": True},
            "  output_layer.weight  [250, 64]  float32: no row of qwen3 uses it",
            "unexpected: output_layer.weight [250, 64]",
        ),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "decoder.layers.self_attention.q_layernorm.weight  [4, 16]  float32: no row of llama",
            "unexpected: decoder.layers.self_attention.k_layernorm.weight [4, 16]",
        ),
        (
            {"vocab_size": 251},
            "model.embed_tokens.weight  [251, 64]  << missing",
            "misshapen: embedding.word_embeddings.weight",
        ),
    ],
)
def test_a_megatron_checkpoint_that_is_another_model_is_marked_key_by_key(
    mcore: Path, tmp_path: Path, fields: dict[str, Any], marked: str, named: str
) -> None:
    code, said, errors = inspect(with_config(mcore, tmp_path / "other", **fields))
    assert code == 1 and errors.count("\n") == 1
    assert marked in said and named in errors


def test_a_megatron_checkpoint_without_config_needs_to_be_told_one(
    checkpoint, mcore: Path, tmp_path: Path
) -> None:
    shutil.copytree(mcore, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "hf")
    code, said, errors = inspect(tmp_path / "bare")
    assert (code, said) == (2, "") and "--config" in errors and errors.count("\n") == 1
    config = checkpoint("qwen3", vocab=250)
    assert inspect(tmp_path / "bare", "--config", str(config))[0] == 0
