"""`inspect` shows all of a checkpoint, and names both sides of whatever does not match."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from tests.families import DENSE
from tests.unit.command_line import run
from tests.unit.edited import Tensors, edit, set_fields

UP = "model.layers.2.mlp.up_proj.weight"


def inspect(path: Path, *options: object) -> tuple[int, str, str]:
    return run("inspect", path, *options)


def test_both_parts_of_a_model_that_sees_pictures_are_shown(checkpoint) -> None:
    code, said, errors = inspect(checkpoint("qwen3_vl"))
    assert (code, errors) == (0, "")
    for line in (
        "  embedding.shell.visual.blocks.{layer}.attn.qkv.weight  [48, 16]  Whole, held whole by "
        "every rank  layers 0-1",
        "      model.visual.blocks.{layer}.attn.qkv.weight  [48, 16]  float32",
        "  translated  text_config.intermediate_size = 128: ffn_hidden_size",
    ):
        assert line in said.splitlines()
    assert "shell =" not in said
    every = inspect(checkpoint("qwen3_vl"), "--all")[1]
    assert "      model.visual.blocks.1.attn.qkv.weight  [48, 16]  float32" in every.splitlines()


@pytest.mark.parametrize(
    ("family", "layers", "single"),
    [
        ("qwen2_5_vl", "visual.blocks.{layer}.", ("visual.merger.mlp.0.", "visual.merger.mlp.2.")),
        (
            "nemotron_h_omni",
            "vision_model.radio_model.model.blocks.{layer}.",
            (*(f"mlp1.{n}." for n in (0, 1, 3)), "sound_encoder.encoder.subsampling.layers.2."),
        ),
    ],
)
def test_only_runs_of_layers_are_folded(
    checkpoint, family: str, layers: str, single: tuple[str, ...]
) -> None:
    """What is numbered otherwise has its name in the file, and no word of layers."""
    path = checkpoint(family)
    said = inspect(path)[1]
    assert f"      {layers}" in said
    names = [name for name in bind(read_config(path)).hf_shapes() if name.startswith(single)]
    assert all(any(name.startswith(part) for name in names) for part in single)
    assert [name for name in names if f"      {name}  " not in said] == []
    for weight in json.loads(inspect(path, "--json")[1])["weights"]:
        templates = [name for name in (weight["megatron"], *weight["hf"]) if "{layer}" in name]
        assert weight["layers"] or not templates


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
    layers = fields["num_hidden_layers"]
    assert (layers["value"], layers["outcome"]) == (4, "translated")
    assert fields["initializer_range"]["outcome"] == "ignored"


def reshape(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP][1:].clone()


def round_down(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].to(torch.int32)


@pytest.mark.parametrize(
    ("change", "marked", "named"),
    [
        (
            lambda tensors: tensors.pop(UP),
            "<< missing",
            f"missing: {UP} [128, 64], which feeds decoder.layers.2.mlp.",
        ),
        (
            lambda tensors: tensors.update({UP.replace("weight", "adapter"): torch.zeros(3)}),
            "no row of qwen2 uses it",
            "unexpected: model.layers.2.mlp.up_proj.adapter [3]",
        ),
        (reshape, "<< is [127, 64]", f"misshapen: {UP} is [127, 64], must be [128, 64]; it feeds"),
        (round_down, "int32  << of a dtype", f"dtype: {UP} is int32; it feeds decoder.layers.2"),
    ],
    ids=["missing", "unexpected", "misshapen", "dtype"],
)
def test_what_does_not_match_is_marked_and_named_on_both_sides(
    checkpoint, tmp_path, change: Callable[[Tensors], object], marked: str, named: str
) -> None:
    code, said, errors = inspect(edit(checkpoint("qwen2"), tmp_path / "bad", change))
    assert code == 1 and errors.startswith("error: ") and errors.count("\n") == 1
    assert marked in said and named in errors
    # The whole table all the same: the others are there, and the config is.
    assert "layers 0-1, 3" in said or named.startswith("unexpected")
    assert "output_layer.weight" in said and "num_hidden_layers = 4" in said


def test_a_refused_field_is_marked_or_how_far_the_translation_came_and_all_weights_are_shown(
    checkpoint, tmp_path
) -> None:
    code, said, errors = inspect(
        edit(checkpoint("qwen2"), tmp_path / "refused", hidden_act="relu", new_trick=3)
    )
    assert code == 1 and "hidden_act = 'relu'" in errors and "new_trick = 3" in errors
    assert "  refused     hidden_act = 'relu': " in said
    assert "  refused     new_trick = 3: unknown field" in said
    assert "decoder.layers.{layer}.mlp.linear_fc1.weight" in said
    ending = edit(checkpoint("qwen2"), tmp_path / "ending", num_key_value_heads=3)
    code, said, errors = inspect(ending)
    assert code == 1 and errors.count("\n") == 1
    assert "translated  num_key_value_heads = 3" in said
    assert f"{UP}  [128, 64]  float32: what it feeds is unknown without the config" in said


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
DYNAMIC = FP8 | {"activation_scheme": "dynamic"}


def to_fp8(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    tensors[f"{UP}_scale_inv"] = torch.ones(1, 1)


def test_fp8_weights_are_shown_as_they_are_read_and_are_no_reference_for_parity(
    checkpoint, tmp_path
) -> None:
    path = edit(checkpoint("qwen2"), tmp_path / "c", to_fp8, quantization_config=DYNAMIC)
    code, said, errors = inspect(path)
    assert (code, errors) == (0, "") and "scale_inv" not in said
    assert "up_proj.weight  [128, 64]  bfloat16" in said
    assert "quantization_config = {" in said
    assert "ignored" in said and "the quantised weights are read as bfloat16" in said
    code, _, errors = run("parity", path)
    assert code == 2 and "convert it to Megatron-Core's format and back" in errors


def test_fp8_weights_that_are_not_read_are_refused_by_name_with_what_to_do(
    checkpoint, tmp_path
) -> None:
    static = FP8 | {"activation_scheme": "static"}
    by_config = edit(checkpoint("qwen2"), tmp_path / "c", to_fp8, quantization_config=static)
    by_tensors = edit(checkpoint("qwen2"), tmp_path / "t", to_fp8)
    found = f"fp8 (e4m3): 1 tensors, the first {UP}, with block scales in 1, the first"
    reason = "its activation_scheme is 'static', and only 'dynamic' is read"
    for command, path, *named in (
        ("inspect", by_config, "fp8 (e4m3, blocks 128 x 128)", reason),
        ("parity", by_config, "fp8 (e4m3, blocks 128 x 128)"),
        ("inspect", by_tensors, found, "put it back as published"),
    ):
        code, _, errors = run(command, path)
        assert code == 1 and errors.count("\n") == 1
        for words in (*named, "FineGrainedFP8Config(dequantize=True)"):
            assert words in errors


@pytest.mark.parametrize(
    ("damage", "exits"),
    [
        (lambda path: (path / "config.json").unlink(), 2),
        (lambda path: (path / "model.safetensors").unlink(), 1),
        (lambda path: os.truncate(path / "model.safetensors", 1000), 1),
        (lambda path: (path / "config.json").write_text("{"), 2),
    ],
    ids=["no config", "no weights", "truncated", "not json"],
)
def test_damage_is_one_line(checkpoint, tmp_path, damage, exits) -> None:
    path = edit(checkpoint("qwen2"), tmp_path / "bad")
    damage(path)
    code, said, errors = inspect(path)
    assert (code, said) == (exits, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1 and str(path) in errors


@pytest.fixture(scope="module")
def mcore(checkpoint, tmp_path_factory) -> Path:
    """An untied checkpoint in Megatron-Core's format."""
    path = tmp_path_factory.mktemp("converted") / "mcore"
    assert run("convert", checkpoint("qwen3", vocab=250), path, "--to", "mcore")[0] == 0
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
    mcore: Path, tmp_path, fields: dict[str, Any], marked: str, named: str
) -> None:
    other = Path(shutil.copytree(mcore, tmp_path / "other"))
    set_fields(other / "hf" / "config.json", **fields)
    code, said, errors = inspect(other)
    assert code == 1 and errors.count("\n") == 1
    assert marked in said and named in errors


def test_a_megatron_checkpoint_without_config_needs_to_be_told_one(
    checkpoint, mcore: Path, tmp_path
) -> None:
    shutil.copytree(mcore, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "hf")
    code, said, errors = inspect(tmp_path / "bare")
    assert (code, said) == (2, "") and "--config" in errors and errors.count("\n") == 1
    assert inspect(tmp_path / "bare", "--config", checkpoint("qwen3", vocab=250))[0] == 0
