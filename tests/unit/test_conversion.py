"""Conversion both ways: every bit comes back, casts and plans are what they say they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy.convert import convert, plan_conversion, verify
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.hf_names import MANIFEST
from megatron_policy.errors import ConfigError, ConversionError
from tests.checkpoints import make_checkpoint
from tests.families import SAMPLES

MIB = 2**20
SMALL = {"layers": 3, "vocab": 250}
Checkpoint = Callable[..., Path]


def round_trip(source: Path, folder: Path, **options: Any) -> tuple[Path, Path]:
    """The paths of the Megatron-Core checkpoint and the HF one made of that."""
    convert(source, folder / "mcore", "mcore", **options)
    convert(folder / "mcore", folder / "hf", "hf", **options)
    return folder / "mcore", folder / "hf"


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        t.dtype == other[name].dtype
        and t.shape == other[name].shape
        and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (t, other[name])))
        for name, t in one.items()
    )


@pytest.mark.dear
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", SAMPLES)
def test_every_family_comes_back_bit_by_bit(
    checkpoint: Checkpoint, tmp_path: Path, family: str, tied: bool
) -> None:
    path = checkpoint(family, tied=tied, dtype="bfloat16", tokenizer=False, **SMALL)
    mcore, hf = round_trip(path, tmp_path, max_memory=MIB)
    assert same_bits(tensors_of(path), tensors_of(hf))
    for one, other in ((path, mcore), (mcore, hf), (path, hf)):
        assert verify(one, other, max_memory=MIB).equal
    assert (hf / "config.json").read_bytes() == (path / "config.json").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_dtype_comes_back_from_shards_to_shards(
    checkpoint: Checkpoint, tmp_path: Path, dtype: str
) -> None:
    path = checkpoint("llama", dtype=dtype, max_shard_size="40KB", **SMALL)
    mcore, hf = round_trip(path, tmp_path, max_shard_size=100_000)
    assert len(list(mcore.glob("*.distcp"))) > 1 and len(list(hf.glob("*.safetensors"))) > 1
    assert same_bits(tensors_of(path), tensors_of(hf))
    with HfReader(hf) as reader:
        assert len(reader.shapes) == len(tensors_of(hf))


def test_tensors_of_several_dtypes_come_back_in_theirs(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path = checkpoint("qwen2", dtype="bfloat16", **SMALL)
    tensors = tensors_of(path)
    for name, dtype in {
        "model.layers.1.input_layernorm.weight": torch.float32,  # others of its key are bfloat16
        "model.layers.0.self_attn.k_proj.weight": torch.float16,  # and of its parameter
        "model.norm.weight": torch.float32,
    }.items():
        tensors[name] = tensors[name].to(dtype)
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_bytes((path / "config.json").read_bytes())
    mcore, hf = round_trip(source, tmp_path, max_memory=MIB)
    assert same_bits(tensors, tensors_of(hf))
    assert verify(source, mcore).equal


def test_every_other_file_comes_back_too(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("qwen3", tied=True, **SMALL)
    mcore, hf = round_trip(path, tmp_path)
    assert sorted(os.listdir(hf)) == sorted([*os.listdir(path), MANIFEST])
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            assert (hf / file.name).read_bytes() == file.read_bytes()
            assert (mcore / "hf" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("way", ["on the way there", "on the way back"])
@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, "fp16"])
def test_a_cast_is_torchs_own_and_the_config_says_so(
    checkpoint: Checkpoint, tmp_path: Path, dtype: Any, way: str
) -> None:
    path = checkpoint("qwen2", dtype="bfloat16" if dtype == "float32" else "float32", **SMALL)
    there = way == "on the way there"
    mcore, hf = tmp_path / "mcore", tmp_path / "hf"
    convert(path, mcore, "mcore", dtype=dtype if there else None)
    convert(mcore, hf, "hf", dtype=None if there else dtype)
    wanted = {"float32": torch.float32, "fp16": torch.float16}.get(dtype, torch.bfloat16)
    assert same_bits({n: t.to(wanted) for n, t in tensors_of(path).items()}, tensors_of(hf))
    old, new = (json.loads((p / "config.json").read_text()) for p in (path, hf))
    named = "dtype" if "dtype" in old else "torch_dtype"
    assert new == old | {named: str(wanted).removeprefix("torch.")}


def test_a_bias_that_corrects_the_choice_of_experts_is_never_cast(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("deepseek_v3", dtype="float32", **SMALL)
    mcore, hf = round_trip(path, tmp_path, dtype="bfloat16")
    for name, tensor in tensors_of(hf).items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
    assert verify(mcore, hf).equal


def test_what_float16_cannot_hold_is_not_cast_to_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.mkdir()
    tensors = tensors_of(original := checkpoint("qwen2", **SMALL))
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_bytes((original / "config.json").read_bytes())
    with pytest.raises(ConversionError, match=r"model\.norm\.weight .* float16"):
        convert(path, tmp_path / "mcore", "mcore", dtype="float16")
    assert os.listdir(tmp_path) == ["source"]
    convert(path, tmp_path / "mcore", "mcore", dtype="bfloat16")


def test_both_formats_have_the_same_digests(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("qwen3", **SMALL)
    there = convert(path, tmp_path / "mcore", "mcore")
    back = convert(tmp_path / "mcore", tmp_path / "hf", "hf")
    assert there.digest == back.digest
    assert (there.had_digests, back.had_digests) == (False, True)
    one, other = (json.loads((tmp_path / n / MANIFEST).read_text()) for n in ("mcore", "hf"))
    assert one["tensors"] == other["tensors"]
    assert one["config"] == other["config"] == json.loads((path / "config.json").read_text())
    assert one["source"]["path"] == str(path) and one["direction"] == "hf -> mcore"
    assert one["source"]["content"] == other["source"]["content"] == there.digest
    assert verify(tmp_path / "mcore", path).has_digests == (True, False)


def test_the_revision_of_a_hub_snapshot_is_noted(checkpoint: Checkpoint, tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "89ef", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in checkpoint("qwen3", **SMALL).iterdir():  # as the hub's cache has them
        shutil.copy(file, blobs / f"hash of {file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash of {file.name}")
    convert(snapshot, tmp_path / "mcore", "mcore")
    assert json.loads((tmp_path / "mcore" / MANIFEST).read_text())["source"]["revision"] == "89ef"


@pytest.mark.dear
@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_the_result_is_the_same_with_any_memory(
    checkpoint: Checkpoint, tmp_path: Path, family: str
) -> None:
    # Tensors of several MiB, and experts whose matrices are transposed in more than one go.
    path = checkpoint(family, hidden=256, vocab=4000, layers=2, ffn=600)
    for name, memory in (("little", MIB), ("much", 2**30)):
        convert(path, tmp_path / name, "mcore", max_memory=memory)
        convert(tmp_path / name, tmp_path / f"{name}-hf", "hf", max_memory=memory)
    for one, other in (("little", "much"), ("little-hf", "much-hf")):
        for file in (tmp_path / one).iterdir():
            if file.is_file() and file.name != MANIFEST:
                assert file.read_bytes() == (tmp_path / other / file.name).read_bytes()
        assert verify(path, tmp_path / one, max_memory=MIB).equal


def test_a_plan_says_what_is_done_and_writes_nothing(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("qwen2", tied=True, dtype="float32", **SMALL)
    plan = plan_conversion(path, tmp_path / "mcore", "mcore", dtype="bf16", max_memory=MIB)
    assert os.listdir(tmp_path) == []
    report = convert(path, tmp_path / "mcore", "mcore", dtype="bf16", max_memory=MIB)
    assert report.plan == plan
    for name, size in plan.files:
        assert (tmp_path / "mcore" / name).stat().st_size == size
    written = {p.relative_to(tmp_path / "mcore").as_posix() for p in tmp_path.rglob("*")}
    assert {name for name, _ in plan.files} | {*plan.side_files} < written
    assert plan.bytes_read == sum(t.nbytes for t in tensors_of(path).values())
    text = "\n".join(plan.describe())
    assert "model.layers.2.mlp.up_proj.weight [128, 64] float32 -> bfloat16" in text
    assert "decoder.layers.mlp.linear_fc1.weight" in text and "no digests" in text
    with pytest.raises(FrozenInstanceError):
        plan.to = "hf"  # type: ignore[misc]


def test_progress_ends_with_everything(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("qwen2", **SMALL)
    seen: list[tuple[int, int]] = []
    report = convert(path, tmp_path / "m", "mcore", progress=lambda *now: seen.append(now))
    assert seen == sorted(seen) and len(seen) > 20
    assert seen[-1] == (report.plan.bytes_read, report.plan.bytes_read)


def test_copies_of_tied_weights_and_what_feeds_nothing_are_left_out(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    original = checkpoint("llama", tied=True, **SMALL)
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_bytes((original / "config.json").read_bytes())
    tensors = tensors_of(original)
    copied = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    useless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors | copied | useless, path / "model.safetensors")
    report = convert(path, tmp_path / "mcore", "mcore")
    assert sorted(report.plan.dropped) == sorted([*copied, *useless])
    assert verify(path, tmp_path / "mcore").equal and verify(original, path).equal

    copied["lm_head.weight"][3, 1] += 1
    save_file(tensors | copied, path / "model.safetensors")
    with pytest.raises(ConversionError, match=r"lm_head\.weight differs"):
        convert(path, tmp_path / "other", "mcore")
    assert not verify(path, tmp_path / "mcore").equal


def test_a_checkpoint_of_megatron_core_without_config_takes_one(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("qwen3", **SMALL)
    convert(path, tmp_path / "mcore", "mcore")
    for file in (tmp_path / "mcore" / "hf").iterdir():
        file.unlink()
    (tmp_path / "mcore" / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="--config"):
        convert(tmp_path / "mcore", tmp_path / "hf", "hf")
    convert(tmp_path / "mcore", tmp_path / "hf", "hf", config=path / "config.json")
    assert verify(path, tmp_path / "hf").equal and verify(tmp_path / "mcore", path).equal
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {
        "config.json",
        "model.safetensors",
        MANIFEST,
    }
    convert(tmp_path / "mcore", tmp_path / "all", "hf", config=path)
    assert (tmp_path / "all" / "tokenizer.json").read_bytes() == (
        path / "tokenizer.json"
    ).read_bytes()


def test_an_existing_destination_is_replaced_only_on_request_and_never_if_it_is_something_else(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path, out = checkpoint("qwen2", **SMALL), tmp_path / "out"
    convert(checkpoint("llama", **SMALL), out, "mcore")
    with pytest.raises(ConfigError, match="overwrite"):
        convert(path, out, "mcore")
    assert verify(checkpoint("llama", **SMALL), out).equal
    convert(path, out, "mcore", overwrite=True)
    assert verify(path, out).equal and os.listdir(tmp_path) == ["out"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        convert(path, other, "mcore", overwrite=True)
    assert os.listdir(other) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"to": "hf"}, "already"),
        ({"to": "onnx"}, "to is 'onnx'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": torch.float64}, "float64"),
        ({"max_memory": 1000}, "max_memory"),
        ({"max_shard_size": 0}, "max_shard_size"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path, wish: dict[str, Any], words: str
) -> None:
    for call in (convert, plan_conversion):
        with pytest.raises(ConfigError, match=words):
            call(checkpoint("qwen2", **SMALL), tmp_path / "x", **{"to": "mcore"} | wish)
    assert os.listdir(tmp_path) == []


def test_a_destination_inside_of_the_source_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    convert(checkpoint("qwen2", **SMALL), tmp_path / "a" / "mcore", "mcore")
    for destination in ("a/mcore/x", "a", "a/mcore"):
        with pytest.raises(ConfigError, match="choose another"):
            convert(tmp_path / "a" / "mcore", tmp_path / destination, "hf", overwrite=True)


def test_verify_names_the_first_differences_and_counts_all(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("qwen2", **SMALL)
    convert(path, tmp_path / "mcore", "mcore")
    tensors = tensors_of(path)
    query = "model.layers.1.self_attn.q_proj.weight"
    tensors[query][3, 5] = -tensors[query][3, 5]
    tensors[query][7, 0] += 1
    norm = "model.layers.0.input_layernorm.weight"
    tensors[norm] = tensors[norm].bfloat16()
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    tensors["stray"] = tensors.pop("model.layers.2.mlp.up_proj.weight")
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file(tensors, changed / "model.safetensors")
    (changed / "config.json").write_bytes((path / "config.json").read_bytes())
    for one, other in ((changed, tmp_path / "mcore"), (path, changed)):
        found = verify(one, other, max_memory=MIB)
        assert not found.equal
        assert found.summary == {"missing": 2, "shape": 1, "dtype": 1, "values": 1}
        words = {(d.kind, d.name): d.message for d in found.differences}
        assert "2 of 4096" in words["values", query] and "[3, 5]" in words["values", query]
        assert ("missing", "stray") in words and ("dtype", norm) in words


def test_nan_and_negative_zero_count_as_the_bits_they_are(tmp_path: Path) -> None:
    for name, values in {"a": (float("nan"), 0.0), "b": (float("nan"), -0.0)}.items():
        (tmp_path / name).mkdir()
        save_file({"x": torch.tensor(values)}, tmp_path / name / "model.safetensors")
    assert verify(tmp_path / "a", tmp_path / "a").equal
    assert verify(tmp_path / "a", tmp_path / "b").summary == {"values": 1}


def test_a_directory_that_only_has_a_config_is_never_replaced(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "hf", "qwen2", tokenizer=False)
    app = tmp_path / "app"
    app.mkdir()
    (app / "config.json").write_text("{}")
    for mark in ("config.json", "metadata.json"):
        (app / mark).write_text("{}")
        with pytest.raises(ConfigError, match="is not a checkpoint"):
            convert(model, app, "mcore", overwrite=True)
    assert {path.name for path in app.iterdir()} == {"config.json", "metadata.json"}


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_as_destination_leads_to_the_checkpoint(tmp_path: Path, dangling: bool) -> None:
    model = make_checkpoint(tmp_path / "hf", "qwen2", tokenizer=False)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    if not dangling:
        (tmp_path / "there").mkdir()
    for _ in range(2):
        convert(model, tmp_path / "link", "mcore", overwrite=True)
        assert (tmp_path / "link").is_symlink()
        assert verify(model, tmp_path / "there").equal
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "link", "there"}


def test_tensors_that_one_side_lacks_and_that_feed_nothing_are_named(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "hf", "llama", tokenizer=False)
    shutil.copytree(model, tmp_path / "more")
    held = load_file(model / "model.safetensors")
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**held, unused: torch.ones(8)}, tmp_path / "more" / "model.safetensors")
    found = verify(model, tmp_path / "more")
    assert (found.equal, found.skipped) == (True, (unused,))


def test_a_config_for_a_checkpoint_that_has_its_own_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "hf", "qwen2", tokenizer=False)
    with pytest.raises(ConfigError, match="of its own"):
        convert(model, tmp_path / "mcore", "mcore", config=model)
