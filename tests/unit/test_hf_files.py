"""Checkpoint directories: which bytes are read, what is refused, and exports that are whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_policy.converters.files.publishing import Staged
from megatron_policy.converters.formats.hf_files import HfReader, locate, read_config
from megatron_policy.converters.formats.hf_names import INDEX, SINGLE
from megatron_policy.converters.formats.hf_writing import write_index, write_shard
from megatron_policy.errors import ConfigError, ConversionError

FORK = multiprocessing.get_context("fork")

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "b.weight": torch.arange(6, dtype=torch.float32).view(2, 3) / 7,
    "c.scalar": torch.tensor(2.5, dtype=torch.float16),
    "d.empty": torch.empty(0, 4),
    "e.bias": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
}


def single(path: Path) -> Path:
    save_file(TENSORS, path / SINGLE)
    return path


def sharded(path: Path) -> Path:
    """Two files and their index."""
    halves = {
        "one.safetensors": ["a.weight", "b.weight"],
        "two.safetensors": ["c.scalar", "e.bias"],
    }
    for file, names in halves.items():
        save_file({name: TENSORS[name] for name in names}, path / file)
    weight_map = {name: file for file, names in halves.items() for name in names}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConversionError) as caught:
        HfReader(path)
    return str(caught.value)


def header_of(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(path: Path, header: dict, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def test_a_single_file_is_read_as_safetensors_reads_it(tmp_path: Path) -> None:
    with HfReader(single(tmp_path)) as reader:
        assert reader.shapes == {name: tuple(t.shape) for name, t in TENSORS.items()}
        assert reader.dtypes == {name: t.dtype for name, t in TENSORS.items()}
        for name, tensor in TENSORS.items():
            assert torch.equal(reader.tensor(name), tensor)


def test_an_indexed_checkpoint_is_read_from_all_its_files_and_no_others(tmp_path: Path) -> None:
    save_file({"stray": torch.ones(1)}, sharded(tmp_path) / "consolidated.safetensors")
    with HfReader(tmp_path) as reader:
        assert sorted(reader.shapes) == ["a.weight", "b.weight", "c.scalar", "e.bias"]
        for name in reader.shapes:
            assert torch.equal(reader.tensor(name), TENSORS[name])


def test_only_what_is_taken_is_counted(tmp_path: Path) -> None:
    with HfReader(single(tmp_path)) as reader:
        part = reader.part("a.weight").view((3, 2, 2))
        assert reader.bytes_read == 0
        assert torch.equal(part[slice(1, 2), slice(0, 1)], torch.tensor([[[4, 5]]]).bfloat16())
        assert reader.bytes_read == 2 * 2
        assert reader.part("b.weight")[(slice(None),)].shape == (2, 3)
        assert reader.bytes_read == 2 * 2 + 6 * 4


def test_a_tensor_outlives_its_reader_and_writing_to_it_leaves_the_file_alone(
    tmp_path: Path,
) -> None:
    with HfReader(single(tmp_path)) as reader:
        tensor = reader.tensor("b.weight")
    tensor.zero_()
    assert torch.equal(load_file(tmp_path / SINGLE)["b.weight"], TENSORS["b.weight"])


def test_a_tensor_that_starts_at_an_odd_byte_is_read_all_the_same(tmp_path: Path) -> None:
    bits = TENSORS["e.bias"].view(torch.uint8).numpy().tobytes()
    header = {
        "flag": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "e.bias": {"dtype": "BF16", "shape": [3], "data_offsets": [1, 7]},
    }
    for pad in (0, 1):  # one of the two puts e.bias on an odd byte of the file
        write_raw(tmp_path / SINGLE, header | {"__metadata__": {"x": "y" * pad}}, b"\1" + bits)
        with HfReader(tmp_path) as reader:
            assert torch.equal(reader.tensor("e.bias"), TENSORS["e.bias"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pad", [0, 1, 2, 3])
def test_wherever_a_tensor_starts_only_the_slice_asked_for_is_taken(
    tmp_path: Path, pad: int, dtype: torch.dtype
) -> None:
    whole = torch.arange(24).to(dtype).view(4, 6)
    name = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    header = {
        "w": {"dtype": name, "shape": [4, 6], "data_offsets": [0, whole.nbytes]},
        "__metadata__": {"x": "y" * pad},
    }
    write_raw(tmp_path / SINGLE, header, whole.view(torch.uint8).numpy().tobytes())
    with HfReader(tmp_path) as reader:
        for index in ((slice(1, 3),), (slice(None), slice(2, 4)), (slice(3, 3),)):
            before, wanted = reader.bytes_read, whole[index]
            taken = reader.part("w").view((4, 6))[index]
            assert torch.equal(taken, wanted) and taken.shape == wanted.shape
            assert reader.bytes_read - before == wanted.nbytes
            held = taken.untyped_storage().nbytes()
            assert held in (wanted.nbytes, (tmp_path / SINGLE).stat().st_size)  # a copy, or a view
        groups = reader.part("w").view((2, 2, 2, 3))[:, :1, 1:]
        assert torch.equal(groups, whole.view(2, 2, 2, 3)[:, :1, 1:])


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    content = (single(tmp_path) / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:kept])
    assert f"{tmp_path / SINGLE} is truncated" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 24]}, "offsets of x contradict"),
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [-4, 20]}, "offsets of x contradict"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "dtype of x is not a name"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
        ([1, 2], "unreadable"),
    ],
)
def test_a_header_that_makes_no_sense_is_named(tmp_path: Path, entry: object, said: str) -> None:
    write_raw(tmp_path / SINGLE, {"x": entry}, bytes(24))
    assert str(tmp_path / SINGLE) in refusal(tmp_path) and said in refusal(tmp_path)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "F99"])
def test_a_dtype_that_is_not_read_is_named_with_its_tensor(tmp_path: Path, dtype: str) -> None:
    entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, 4]}
    write_raw(tmp_path / SINGLE, {"x": entry}, bytes(4))
    said = refusal(tmp_path)
    assert f"{tmp_path / SINGLE} cannot be read: x is in the dtype {dtype}" in said
    assert "again" not in said and "truncated" not in said


NARROW = {n: getattr(torch, f"float8_{n}") for n in ("e8m0fnu", "e4m3fnuz", "e5m2fnuz")}
OTHERS = [*NARROW.values(), torch.uint16, torch.uint32, torch.uint64, torch.complex64]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_every_dtype_of_the_format_that_torch_has_is_read_as_safetensors_reads_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    save_file({"x": torch.arange(1, 9).float().to(dtype)}, tmp_path / SINGLE)
    (found, wanted) = HfReader(tmp_path).tensor("x"), load_file(tmp_path / SINGLE)["x"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_an_index_that_names_a_tensor_that_no_file_has_is_refused_with_both_ways_out(
    tmp_path: Path,
) -> None:
    index = json.loads((sharded(tmp_path) / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "two.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    said = refusal(tmp_path)
    assert f"{tmp_path / INDEX} names tensors that no file has: lm_head.weight." in said
    assert "take their names out of the index" in said


def test_a_whole_model_with_adapters_beside_it_is_refused_with_both_ways_out(
    tmp_path: Path,
) -> None:
    (single(tmp_path) / "adapter_config.json").write_text("{}")
    said = refusal(tmp_path)
    assert f"{tmp_path} has adapter_config.json beside whole weights" in said
    assert "Remove adapter_config.json" in said and "--merge" in said
    assert "put it with the adapters' weights into" in said and "adapter_model" not in said
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    assert "otherwise move it with adapter_model.safetensors into" in refusal(tmp_path)
    assert HfReader(tmp_path, "adapter_model.safetensors").shapes.keys() == TENSORS.keys()


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", 20) + b"PK this is not json." + bytes(40))
    assert "not a safetensors file" in refusal(tmp_path)


def test_missing_files_of_an_index_are_all_named(tmp_path: Path) -> None:
    for file in ("one.safetensors", "two.safetensors"):
        (sharded(tmp_path) / file).unlink()
        assert f"lacks files that its index names: {file}" in refusal(tmp_path)


def test_an_index_that_lies_is_refused_with_both_lies(tmp_path: Path) -> None:
    index = json.loads((sharded(tmp_path) / INDEX).read_text())
    index["weight_map"] |= {"a.weight": "two.safetensors", "e.bias": "one.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps(index))
    said = refusal(tmp_path)
    assert "two.safetensors lacks a.weight, which the index places there" in said
    assert "holds e.bias, which the index does not" in said


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    assert f"{tmp_path / INDEX} is not an index" in refusal(tmp_path)


def test_a_checkpoint_without_safetensors_says_what_it_has_instead(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    said = refusal(tmp_path)
    assert "neither model.safetensors nor" in said and "weights found: pytorch_model.bin" in said


def test_a_model_that_is_nowhere_is_refused_by_name(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for ask in (locate, read_config, HfReader):
        with pytest.raises(ConfigError, match="nowhere' is not a directory"):
            ask(nowhere)


def test_what_is_no_model_is_answered_with_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "run" / "policy").mkdir(parents=True)
    (tmp_path / "run" / "grpo.yaml").write_text("")
    with pytest.raises(
        ConfigError, match=r"run has no config\.json: .* but has grpo\.yaml, policy"
    ):
        read_config(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"but a file: `megatron-policy inspect-config` reads"):
        locate(tmp_path / "run" / "grpo.yaml")
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match=r"but a file: give its directory, .*run$"):
        locate(tmp_path / "run" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"did you mean '.*run/config\.json'"):
        locate(tmp_path / "run" / "config.jsn")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read"),
        ("{}", "cannot be read"),
        ("[]", "it is not a JSON object"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot be read"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(
    tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("place", [".", "iter_0000001"])
def test_a_checkpoint_of_megatron_core_in_its_place_is_recognised(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "__0_0.distcp").write_text("")
    with pytest.raises(ConfigError, match=r"convert .* OUT --to hf` makes one of it"):
        read_config(tmp_path)


def test_a_model_type_that_nobody_knows_is_refused_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of", "auto_map": {}}')
    with pytest.raises(
        ConversionError, match=r"'unheard-of'; .*llama.*\(FSDP2\); docs/add-a-model\.md .*models\.$"
    ):
        read_config(tmp_path)


def test_copies_are_compared_slice_by_slice_over_the_ranks(tmp_path: Path) -> None:
    embedding = torch.randn(10, 4)
    other = embedding.clone()
    other[7, 2] += 1
    save_file({"e": embedding, "same": embedding.clone(), "other": other}, tmp_path / SINGLE)
    with HfReader(tmp_path) as reader:
        reader.check_copies({"same": "e", "absent": "e"})
        reader.check_copies({"other": "e"}, rank=0, size=2)
        with pytest.raises(ConversionError, match="other differs from e"):
            reader.check_copies({"other": "e"}, rank=1, size=2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.float64])
def test_a_copy_of_another_dtype_is_compared_by_value(tmp_path: Path, dtype: torch.dtype) -> None:
    embedding = torch.arange(8).bfloat16().view(4, 2)
    copies = {"same": embedding.to(dtype), "other": embedding.flip(0).to(dtype)}
    save_file({"e": embedding, **copies}, tmp_path / SINGLE)
    with HfReader(tmp_path) as reader:
        reader.check_copies({"same": "e"})
        with pytest.raises(ConversionError, match="other differs from e"):
            reader.check_copies({"other": "e"})


def test_a_written_file_is_read_by_safetensors_bit_for_bit_and_aligned(tmp_path: Path) -> None:
    leaf = torch.nn.Parameter(torch.randn(4, 4))
    written = TENSORS | {"strided": leaf[:, ::2], "leaf": leaf}
    inventory = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in written.items()}
    write_shard(tmp_path, SINGLE, inventory, reversed(list(written.items())))
    with safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name, tensor in load_file(tmp_path / SINGLE).items():
        assert tensor.dtype == written[name].dtype and torch.equal(tensor, written[name])
    header, data = header_of(tmp_path / SINGLE)
    begin = (tmp_path / SINGLE).stat().st_size - len(data)
    for entry in (header[name] for name in written):
        assert (begin + entry["data_offsets"][0]) % (4 if entry["dtype"] == "F32" else 2) == 0


def test_only_a_checkpoint_of_several_files_has_an_index(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": SINGLE, "b": SINGLE}, 8)
    assert not (tmp_path / INDEX).exists()
    write_index(tmp_path, {"a": "one", "b": "two"}, 8)
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 8},
        "weight_map": {"a": "one", "b": "two"},
    }


def export(destination: Path, text: str, overwrite: bool = False) -> None:
    staged = Staged([destination], overwrite)
    (partial,) = staged.partials
    (partial / "config.json").write_text(text)
    (partial / "model.safetensors").write_text(text)
    assert all(text not in path.read_text() for path in destination.glob("*"))
    staged.publish()


def test_an_export_appears_at_once_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    export(out, "first")
    assert (out / "config.json").read_text() == "first"
    assert os.listdir(out.parent) == ["out"]


def test_what_a_broken_export_left_is_cleared_away(tmp_path: Path) -> None:
    out = tmp_path / "out"
    broken = FORK.Process(target=break_off, args=(out,))
    broken.start()
    broken.join(60)
    assert broken.exitcode == 9 and not out.exists() and len(os.listdir(tmp_path)) == 1
    export(out, "second")
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


def break_off(out: Path) -> None:
    (partial,) = Staged([out]).partials
    (partial / "model-00001-of-00002.safetensors").write_text("half")
    os._exit(9)


def test_an_existing_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(out, "first")
    with pytest.raises(ConfigError, match="overwrite=True"):
        Staged([out])
    assert os.listdir(tmp_path) == ["out"]
    export(out, "second", overwrite=True)
    assert (out / "config.json").read_text() == "second"
    assert os.listdir(tmp_path) == ["out"]


def test_a_directory_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(out, "into an empty directory")
    (out / "config.json").rename(out / "thesis.tex")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is not a checkpoint"):
            Staged([out], overwrite)
    assert sorted(os.listdir(out)) == ["model.safetensors", "thesis.tex"]
