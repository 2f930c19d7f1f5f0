"""Conversion both ways: every bit comes back, casts and plans are what they say they are."""

from __future__ import annotations

import json
import os
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
from tests.families import SAMPLES
from tests.unit.edited import Tensors, change_tensors, edit

MIB = 2**20
SMALL = {"layers": 3, "vocab": 250}


def round_trip(source: Path, folder: Path, **options: Any) -> tuple[Path, Path]:
    """The paths of the Megatron-Core checkpoint and the HF one made of that."""
    convert(source, folder / "mcore", "mcore", **options)
    convert(folder / "mcore", folder / "hf", "hf", **options)
    return folder / "mcore", folder / "hf"


def tensors_of(path: Path) -> Tensors:
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


def same_bits(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        t.dtype == other[name].dtype
        and t.shape == other[name].shape
        and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (t, other[name])))
        for name, t in one.items()
    )


@pytest.mark.dear
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, id=f"{family}-{'tied' if tied else 'untied'}")
        for family, samples in SAMPLES.items()
        for tied in (True, False)
        if not (tied and samples.untied)
    ],
)
def test_every_family_comes_back_bit_by_bit(checkpoint, tmp_path, family: str, tied: bool) -> None:
    path = checkpoint(family, tied=tied, dtype="bfloat16", tokenizer=False, **SMALL)
    mcore, hf = round_trip(path, tmp_path, max_memory=MIB)
    assert same_bits(tensors_of(path), tensors_of(hf))
    for one, other in ((path, mcore), (mcore, hf), (path, hf)):
        assert verify(one, other, max_memory=MIB).equal
    assert (hf / "config.json").read_bytes() == (path / "config.json").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_dtype_comes_back_from_shards_to_shards(checkpoint, tmp_path, dtype: str) -> None:
    path = checkpoint("llama", dtype=dtype, max_shard_size="40KB", **SMALL)
    mcore, hf = round_trip(path, tmp_path, max_shard_size=100_000)
    assert len(list(mcore.glob("*.distcp"))) > 1 and len(list(hf.glob("*.safetensors"))) > 1
    assert same_bits(tensors_of(path), tensors_of(hf))
    with HfReader(hf) as reader:
        assert len(reader.shapes) == len(tensors_of(hf))


def test_tensors_of_several_dtypes_come_back_in_theirs(checkpoint, tmp_path) -> None:
    def cast(tensors: Tensors) -> None:
        for name, dtype in {
            "model.layers.1.input_layernorm.weight": torch.float32,  # others of its key: bfloat16
            "model.layers.0.self_attn.k_proj.weight": torch.float16,  # and of its parameter
            "model.norm.weight": torch.float32,
        }.items():
            tensors[name] = tensors[name].to(dtype)

    source = edit(checkpoint("qwen2", dtype="bfloat16", **SMALL), tmp_path / "source", cast)
    mcore, hf = round_trip(source, tmp_path, max_memory=MIB)
    assert same_bits(tensors_of(source), tensors_of(hf))
    assert len({tensor.dtype for tensor in tensors_of(hf).values()}) == 3
    assert verify(source, mcore).equal


@pytest.mark.parametrize("way", ["on the way there", "on the way back"])
@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, "fp16"])
def test_a_cast_is_torchs_own_and_the_config_says_so(checkpoint, tmp_path, dtype, way) -> None:
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


def test_a_bias_that_corrects_the_choice_of_experts_is_never_cast(checkpoint, tmp_path) -> None:
    path = checkpoint("deepseek_v3", dtype="float32", **SMALL)
    mcore, hf = round_trip(path, tmp_path, dtype="bfloat16")
    for name, tensor in tensors_of(hf).items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
    assert verify(mcore, hf).equal


def test_what_float16_cannot_hold_is_not_cast_to_it(checkpoint, tmp_path) -> None:
    def enlarge(tensors: Tensors) -> None:
        tensors["model.norm.weight"][3] = 1e6

    path = edit(checkpoint("qwen2", **SMALL), tmp_path / "source", enlarge)
    with pytest.raises(ConversionError, match=r"model\.norm\.weight .* float16"):
        convert(path, tmp_path / "mcore", "mcore", dtype="float16")
    assert os.listdir(tmp_path) == ["source"]
    convert(path, tmp_path / "mcore", "mcore", dtype="bfloat16")


def test_both_formats_have_the_same_digests_and_every_other_file(checkpoint, tmp_path) -> None:
    path, mcore, hf = checkpoint("qwen3", tied=True, **SMALL), tmp_path / "mcore", tmp_path / "hf"
    there, back = convert(path, mcore, "mcore"), convert(mcore, hf, "hf")
    assert there.digest == back.digest
    assert (there.had_digests, back.had_digests) == (False, True)
    one, other = (json.loads((folder / MANIFEST).read_text()) for folder in (mcore, hf))
    assert one["tensors"] == other["tensors"]
    assert one["config"] == other["config"] == json.loads((path / "config.json").read_text())
    assert one["source"]["path"] == str(path) and one["direction"] == "hf -> mcore"
    assert one["source"]["content"] == other["source"]["content"] == there.digest
    assert verify(mcore, path).has_digests == (True, False)
    assert sorted(os.listdir(hf)) == sorted([*os.listdir(path), MANIFEST])
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            assert (hf / file.name).read_bytes() == file.read_bytes()
            assert (mcore / "hf" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.dear
@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_the_result_is_the_same_with_any_memory(checkpoint, tmp_path, family: str) -> None:
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


def test_a_plan_says_what_is_done_and_writes_nothing_and_progress_ends_with_all(
    checkpoint, tmp_path
) -> None:
    path = checkpoint("qwen2", tied=True, dtype="float32", **SMALL)
    plan = plan_conversion(path, tmp_path / "mcore", "mcore", dtype="bf16", max_memory=MIB)
    assert os.listdir(tmp_path) == []
    seen: list[tuple[int, int]] = []
    asked = {"dtype": "bf16", "max_memory": MIB, "progress": lambda *now: seen.append(now)}
    assert convert(path, tmp_path / "mcore", "mcore", **asked).plan == plan
    assert seen == sorted(seen) and len(seen) > 20 and seen[-1] == (plan.bytes_read,) * 2
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


def test_copies_of_tied_weights_and_what_feeds_nothing_are_left_out(checkpoint, tmp_path) -> None:
    original, useless = (
        checkpoint("llama", tied=True, **SMALL),
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    )

    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[useless] = torch.ones(8)

    path = edit(original, tmp_path / "source", add)
    report = convert(path, tmp_path / "mcore", "mcore")
    assert sorted(report.plan.dropped) == ["lm_head.weight", useless]
    assert verify(path, tmp_path / "mcore").equal
    found = verify(original, path)
    assert found.equal and found.skipped == (useless,)

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"][3, 1] += 1

    change_tensors(path / "model.safetensors", change)
    with pytest.raises(ConversionError, match=r"lm_head\.weight differs"):
        convert(path, tmp_path / "other", "mcore")
    assert not verify(path, tmp_path / "mcore").equal


def test_a_checkpoint_takes_a_config_if_it_has_none_of_its_own(checkpoint, tmp_path) -> None:
    path = checkpoint("qwen3", **SMALL)
    convert(path, tmp_path / "mcore", "mcore")
    for file in (tmp_path / "mcore" / "hf").iterdir():
        file.unlink()
    (tmp_path / "mcore" / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="--config"):
        convert(tmp_path / "mcore", tmp_path / "hf", "hf")
    convert(tmp_path / "mcore", tmp_path / "hf", "hf", config=path / "config.json")
    assert verify(path, tmp_path / "hf").equal and verify(tmp_path / "mcore", path).equal
    assert set(os.listdir(tmp_path / "hf")) == {"config.json", "model.safetensors", MANIFEST}
    convert(tmp_path / "mcore", tmp_path / "all", "hf", config=path)
    copied = (tmp_path / "all" / "tokenizer.json").read_bytes()
    assert copied == (path / "tokenizer.json").read_bytes()
    with pytest.raises(ConfigError, match="of its own"):
        convert(path, tmp_path / "another", "mcore", config=path)


def test_an_existing_destination_is_replaced_only_on_request_and_never_if_it_is_something_else(
    checkpoint, tmp_path
) -> None:
    path, out = checkpoint("qwen2", **SMALL), tmp_path / "out"
    convert(checkpoint("llama", **SMALL), out, "mcore")
    with pytest.raises(ConfigError, match="overwrite"):
        convert(path, out, "mcore")
    assert verify(checkpoint("llama", **SMALL), out).equal
    convert(path, out, "mcore", overwrite=True)
    assert verify(path, out).equal and os.listdir(tmp_path) == ["out"]
    (tmp_path / "mine").mkdir()
    for names in ({"thesis.tex"}, {"config.json"}, {"config.json", "metadata.json"}):
        for file in (tmp_path / "mine").iterdir():
            file.unlink()
        for name in names:
            (tmp_path / "mine" / name).write_text("{}")
        with pytest.raises(ConfigError, match="is not a checkpoint"):
            convert(path, tmp_path / "mine", "mcore", overwrite=True)
        assert set(os.listdir(tmp_path / "mine")) == names


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
def test_a_wish_that_cannot_be_met_is_refused_by_name(checkpoint, tmp_path, wish, words) -> None:
    for call in (convert, plan_conversion):
        with pytest.raises(ConfigError, match=words):
            call(checkpoint("qwen2", **SMALL), tmp_path / "x", **{"to": "mcore"} | wish)
    assert os.listdir(tmp_path) == []


def test_a_destination_inside_of_the_source_is_refused(checkpoint, tmp_path) -> None:
    convert(checkpoint("qwen2", **SMALL), tmp_path / "a" / "mcore", "mcore")
    for destination in ("a/mcore/x", "a", "a/mcore"):
        with pytest.raises(ConfigError, match="choose another"):
            convert(tmp_path / "a" / "mcore", tmp_path / destination, "hf", overwrite=True)


def test_verify_names_the_first_differences_and_counts_all(checkpoint, tmp_path) -> None:
    query, norm = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"

    def change(tensors: Tensors) -> None:
        tensors[query][3, 5] = -tensors[query][3, 5]
        tensors[query][7, 0] += 1
        tensors[norm] = tensors[norm].bfloat16()
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        tensors["stray"] = tensors.pop("model.layers.2.mlp.up_proj.weight")

    path = checkpoint("qwen2", **SMALL)
    convert(path, tmp_path / "mcore", "mcore")
    changed = edit(path, tmp_path / "changed", change)
    for one, other in ((changed, tmp_path / "mcore"), (path, changed)):
        found = verify(one, other, max_memory=MIB)
        assert not found.equal
        assert found.summary == {"missing": 2, "shape": 1, "dtype": 1, "values": 1}
        words = {(d.kind, d.name): d.message for d in found.differences}
        assert "2 of 4096" in words["values", query] and "[3, 5]" in words["values", query]
        assert ("missing", "stray") in words and ("dtype", norm) in words


def test_nan_and_negative_zero_count_as_the_bits_they_are(tmp_path) -> None:
    for name, values in {"a": (float("nan"), 0.0), "b": (float("nan"), -0.0)}.items():
        (tmp_path / name).mkdir()
        save_file({"x": torch.tensor(values)}, tmp_path / name / "model.safetensors")
    assert verify(tmp_path / "a", tmp_path / "a").equal
    assert verify(tmp_path / "a", tmp_path / "b").summary == {"values": 1}


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_as_destination_leads_to_the_checkpoint(checkpoint, tmp_path, dangling) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    if not dangling:
        (tmp_path / "there").mkdir()
    for _ in range(2):
        convert(checkpoint("qwen2", **SMALL), tmp_path / "link", "mcore", overwrite=True)
        assert (tmp_path / "link").is_symlink()
        assert verify(checkpoint("qwen2", **SMALL), tmp_path / "there").equal
    assert set(os.listdir(tmp_path)) == {"link", "there"}
