"""Layers for multi-token prediction in tables and conversions: held, left out, and their copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy.convert import convert, verify
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dist_files import DistReader
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.inspection import inspect
from megatron_policy.converters.rows import fill_parts, fill_shard
from megatron_policy.converters.table import Table, bind
from megatron_policy.errors import ConversionError
from megatron_policy.weights.load import canonical_name
from tests.checkpoints import make_checkpoint
from tests.mtp_checkpoints import (
    COPIES,
    NUMBERED,
    ONE_AT_MOST,
    add_mtp_layers,
    layer_name,
    own_names,
)

SMALL = {"hidden": 16, "heads": 4, "layers": 2, "ffn": 24, "vocab": 150, "tokenizer": False}


def made(path: Path, family: str, layers: int = 1, copies: bool = True) -> Path:
    return add_mtp_layers(make_checkpoint(path, family, **SMALL), layers, copies)


@pytest.mark.parametrize("family", NUMBERED)
def test_held_layers_use_every_tensor_of_theirs_and_left_out_ones_are_carried(
    tmp_path: Path, family: str
) -> None:
    path = made(tmp_path, family, layers=2)
    config = read_config(path)
    with HfReader(path) as reader:
        shapes, dtypes = dict(reader.shapes), reader.dtypes
    starts = [layer_name(config, number) for number in (0, 1)]
    mtp = {n: number for number in (0, 1) for n in shapes if n.startswith(starts[number])}
    copies = {n for n in mtp if n.endswith(tuple(COPIES))}
    for held in (0, 1, 2):
        table = bind(config, mtp_layers=held)
        table.check_hf(shapes, dtypes)
        beyond = {name for name, number in mtp.items() if number >= held}
        fed = set(table.hf_shapes())
        assert fed == shapes.keys() - beyond - copies
        assert {name for name in table.carried() if name in shapes} == beyond
        sent = [name for entry in table.sent(shapes) for name in entry.hf]
        assert set(sent) - fed == copies - beyond
        assert len(sent) == len(set(sent))
    name = starts[0] + own_names(config)[2]
    with pytest.raises(ConversionError, match=name):
        table.check_hf(shapes | {name: (16, 16)}, dtypes)
    del shapes[name]
    with pytest.raises(ConversionError, match=f"missing: {name}"):
        table.check_hf(shapes, dtypes)


@pytest.mark.parametrize("family", [*NUMBERED, "nemotron_h"])
def test_elements_of_held_layers_come_back_from_two_shards(tmp_path: Path, family: str) -> None:
    path = made(tmp_path, family)
    table = bind(read_config(path), mtp_layers=1)
    arch = table.architecture
    entries = [entry for entry in table.exported() if entry.megatron.startswith("mtp.")]
    assert {f"mtp.layers.0.{name}" for name in ("enorm.weight", "eh_proj.weight")} <= {
        entry.megatron for entry in entries
    }
    with HfReader(path) as reader:
        for entry in entries:
            back = [torch.full_like(reader.tensor(name), torch.nan) for name in entry.hf]
            for rank in range(2):
                shard = torch.full(entry.row.local_shape(arch, 2), torch.nan)
                fill_shard(entry.row, arch, shard, [reader.part(n) for n in entry.hf], rank, 2)
                fill_parts(entry.row, arch, back, shard, rank, 2)
            for name, tensor in zip(entry.hf, back, strict=True):
                assert torch.equal(tensor, reader.tensor(name)), name


def test_a_model_that_lacks_these_layers_says_how_many_can_be_asked_for(tmp_path: Path) -> None:
    path = made(tmp_path / "one", "deepseek_v3")
    with pytest.raises(ConversionError, match=r"has 1 layer.* asks for 2: set it to 1 or less"):
        bind(read_config(path), mtp_layers=2)
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", **SMALL)
    with pytest.raises(ConversionError, match=r"asks for 1: set it to 0$"):
        bind(read_config(plain), mtp_layers=1)


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_differs_from_what_it_copies_is_refused(tmp_path: Path, copy: str) -> None:
    path = made(tmp_path, "deepseek_v3")
    tensors = load_file(path / "model.safetensors")
    tensors[f"model.layers.2.{copy}"][3, 1] += 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    table = bind(read_config(path), mtp_layers=1)
    with HfReader(path) as reader, pytest.raises(ConversionError) as caught:
        reader.check_copies(table.copies())
    assert f"model.layers.2.{copy} differs from {COPIES[copy]}" in str(caught.value)
    assert "mtp_num_layers to 0" in str(caught.value)
    # Left out, such a layer is no matter of the policy.
    with HfReader(path) as reader:
        reader.check_copies(bind(read_config(path)).copies())


@pytest.mark.dear
@pytest.mark.parametrize("family", [*NUMBERED, "nemotron_h"])
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "no copies"])
def test_a_conversion_there_and_back_loses_nothing(
    tmp_path: Path, family: str, copies: bool
) -> None:
    layers = 1 if family in ONE_AT_MOST else 2
    path = made(tmp_path / "hf", family, layers, copies)
    convert(path, tmp_path / "mcore", "mcore")
    with RawFiles() as files:
        keys = DistReader(tmp_path / "mcore", files).keys
    last = f"mtp.layers.{layers - 1}."
    assert {last + name for name in ("enorm.weight", "final_layernorm.weight")} <= set(keys)
    assert not any("embed_tokens" in key or "shared_head" in key for key in keys)
    convert(tmp_path / "mcore", tmp_path / "again", "hf")
    assert verify(path, tmp_path / "mcore").equal and verify(path, tmp_path / "again").equal
    before = load_file(path / "model.safetensors")
    with HfReader(tmp_path / "again") as reader:
        assert before.keys() <= reader.shapes.keys()
        for name in reader.shapes:
            if name not in before:
                assert not copies and name.endswith(tuple(COPIES))
            original = before[name if name in before else COPIES[name.split(".", 3)[3]]]
            assert reader.dtypes[name] == original.dtype, name
            assert torch.equal(reader.tensor(name), original), name


def test_a_checkpoint_whose_config_counts_layers_it_lacks_converts_without_them(
    tmp_path: Path,
) -> None:
    path = make_checkpoint(tmp_path / "hf", "deepseek_v3", **SMALL)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    convert(path, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "again", "hf")
    assert verify(path, tmp_path / "again").equal


def test_inspection_shows_the_rows_and_names_the_copies(tmp_path: Path) -> None:
    path = made(tmp_path, "deepseek_v3")
    with HfReader(path) as reader:
        names, shapes, dtypes = list(reader.shapes), reader.shapes, reader.dtypes
    seen = inspect(read_config(path), {}, shapes, dtypes)
    assert not seen.problems and not seen.unmatched
    rows = {weight.megatron: weight.layers for weight in seen.weights}
    assert rows["mtp.layers.0.eh_proj.weight"] == (2,)
    hf = {name for weight in seen.weights for name in weight.hf}
    assert "model.layers.{layer}.shared_head.norm.weight" in hf
    assert not any(mark in name for name in (*rows, *hf) for mark in ("{mtp}", "{predicting}"))
    assert {loose.name for loose in seen.ignored} == {f"model.layers.2.{name}" for name in COPIES}
    table = open_model(path, tensors=names).table
    assert isinstance(table, Table) and table.architecture.mtp_layers == 1


def test_names_of_a_built_model_are_those_of_the_table() -> None:
    names = {
        "mtp_block.layers.0.enorm.weight": "mtp.layers.0.enorm.weight",
        "module.mtp_block.embedding.word_embeddings.weight": (
            "mtp.embedding.word_embeddings.weight"
        ),
        "mtp_block.layers.1.transformer_layer.mlp.experts.linear_fc1.weight2": (
            "mtp.layers.1.transformer_layer.mlp.experts.local_experts.6.linear_fc1.weight"
        ),
        "mtp_block.layers.0.transformer_layer.mlp.linear_fc1.layer_norm_weight": (
            "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight"
        ),
    }
    for built, canonical in names.items():
        assert canonical_name(built, 3, 4) == canonical
