"""Checkpoint directories: which bytes are read, what is refused, and exports that are whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_policy.converters.formats.hf_files import HfReader, locate, read_config
from megatron_policy.converters.formats.hf_names import INDEX, SINGLE
from megatron_policy.converters.formats.hf_writing import write_index, write_shard
from megatron_policy.errors import ConfigError, ConversionError

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


def sharded(path: Path, **more: str) -> Path:
    """Two files and their index, which names `more` tensors in files of that name."""
    halves = {"one": ["a.weight", "b.weight"], "two": ["c.scalar", "e.bias"]}
    for file, names in halves.items():
        save_file({name: TENSORS[name] for name in names}, path / f"{file}.safetensors")
    placed = {name: file for file, names in halves.items() for name in names} | more
    weight_map = {name: f"{file}.safetensors" for name, file in placed.items()}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConversionError) as caught:
        HfReader(path)
    return str(caught.value)


def write_raw(path: Path, header: dict, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def test_a_single_file_is_read_as_safetensors_reads_it_and_what_is_taken_is_counted(
    tmp_path: Path,
) -> None:
    with HfReader(single(tmp_path)) as reader:
        assert reader.shapes == {name: tuple(t.shape) for name, t in TENSORS.items()}
        assert reader.dtypes == {name: t.dtype for name, t in TENSORS.items()}
        for name, tensor in TENSORS.items():
            assert torch.equal(reader.tensor(name), tensor)
    with HfReader(tmp_path) as reader:
        part = reader.part("a.weight").view((3, 2, 2))
        assert reader.bytes_read == 0
        assert torch.equal(part[slice(1, 2), slice(0, 1)], torch.tensor([[[4, 5]]]).bfloat16())
        assert reader.bytes_read == 2 * 2
        assert reader.part("b.weight")[(slice(None),)].shape == (2, 3)
        assert reader.bytes_read == 2 * 2 + 6 * 4
        tensor = reader.tensor("b.weight")
    tensor.zero_()  # which outlives its reader, and is not the file
    assert torch.equal(load_file(tmp_path / SINGLE)["b.weight"], TENSORS["b.weight"])


def test_an_indexed_checkpoint_is_read_from_all_its_files_and_no_others(tmp_path: Path) -> None:
    save_file({"stray": torch.ones(1)}, sharded(tmp_path) / "consolidated.safetensors")
    with HfReader(tmp_path) as reader:
        assert sorted(reader.shapes) == ["a.weight", "b.weight", "c.scalar", "e.bias"]
        assert all(torch.equal(reader.tensor(name), TENSORS[name]) for name in reader.shapes)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float32, "F32")])
@pytest.mark.parametrize("pad", [0, 1, 2, 3])
def test_wherever_a_tensor_starts_only_the_slice_asked_for_is_taken(
    tmp_path: Path, pad: int, dtype: torch.dtype, name: str
) -> None:
    """Also at an odd byte of the file."""
    whole = torch.arange(24).to(dtype).view(4, 6)
    header = {
        "w": {"dtype": name, "shape": [4, 6], "data_offsets": [0, whole.nbytes]},
        "__metadata__": {"x": "y" * pad},
    }
    write_raw(tmp_path / SINGLE, header, whole.view(torch.uint8).numpy().tobytes())
    with HfReader(tmp_path) as reader:
        assert torch.equal(reader.tensor("w"), whole)
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
        *(
            ({"dtype": dtype, "shape": [8], "data_offsets": [0, 4]}, f"x is in the dtype {dtype}")
            for dtype in ("F4", "F6_E2M3", "F6_E3M2", "F99")
        ),
    ],
)
def test_a_header_that_cannot_be_read_is_named(tmp_path: Path, entry: object, said: str) -> None:
    write_raw(tmp_path / SINGLE, {"x": entry}, bytes(24))
    found = refusal(tmp_path)
    assert str(tmp_path / SINGLE) in found and said in found
    if "in the dtype" in said:
        assert "again" not in found and "truncated" not in found


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


def test_an_index_that_names_what_no_file_has_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    said = refusal(sharded(tmp_path, **{"lm_head.weight": "two"}))
    assert f"{tmp_path / INDEX} names tensors that no file has: lm_head.weight." in said
    assert "take their names out of the index" in said
    said = refusal(sharded(tmp_path, **{"a.weight": "two", "e.bias": "one"}))
    assert "two.safetensors lacks a.weight, which the index places there" in said
    assert "holds e.bias, which the index does not" in said
    for file in ("one.safetensors", "two.safetensors"):
        (sharded(tmp_path) / file).unlink()
        assert f"lacks files that its index names: {file}" in refusal(tmp_path)


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


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_what_is_no_index_no_safetensors_or_neither_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    assert f"{tmp_path / INDEX} is not an index" in refusal(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    said = refusal(tmp_path)
    assert "neither model.safetensors nor" in said and "weights found: pytorch_model.bin" in said
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", 20) + b"PK this is not json." + bytes(40))
    assert "not a safetensors file" in refusal(tmp_path)


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
    for ask in (locate, read_config, HfReader):
        with pytest.raises(ConfigError, match="nowhere' is not a directory"):
            ask(tmp_path / "nowhere")


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for content, said in (
        (None, "has no config.json"),
        ("{", "cannot be read"),
        ("{}", "cannot be read"),
        ("[]", "it is not a JSON object"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot be read"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"{tmp_path}.*{said}|{said}.*{tmp_path}"):
            read_config(tmp_path)


def test_a_checkpoint_of_megatron_core_in_its_place_is_recognised(tmp_path: Path) -> None:
    for place in ("one", "several/iter_0000001"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "__0_0.distcp").write_text("")
        with pytest.raises(ConfigError, match=r"convert .* --config MODEL` makes one of it"):
            read_config(tmp_path / place.split("/")[0])


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
    content = (tmp_path / SINGLE).read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:begin])
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
