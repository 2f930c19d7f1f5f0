"""Damaged checkpoints of either format: found, named, and nothing is made of them."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

from megatron_policy.convert import convert, verify
from megatron_policy.converters.formats.hf_names import INDEX, MANIFEST
from megatron_policy.errors import ConfigError, ConversionError

SMALL = {"layers": 2, "vocab": 250, "hidden": 32, "heads": 2, "groups": 1, "ffn": 48}
Damage = Callable[[Path], str]
"""Does something to a checkpoint, and returns what the error has to name."""


@pytest.fixture(scope="module")
def made(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the same model in both formats, with digests and in several files: `hf` and
    `mcore`.
    """
    folder = tmp_path_factory.mktemp("made")
    path = checkpoint("qwen2", dtype="bfloat16", **SMALL)
    convert(path, folder / "mcore", "mcore", max_shard_size=50_000)
    convert(folder / "mcore", folder / "hf", "hf", max_shard_size=40_000)
    assert len(list((folder / "mcore").glob("*.distcp"))) > 1
    assert len(list((folder / "hf").glob("*.safetensors"))) > 1
    return folder


def copy_of(made: Path, kind: str, tmp_path: Path, digests: bool) -> Path:
    """A copy to damage, with or without its manifest."""
    path = tmp_path / kind
    shutil.copytree(made / kind, path)
    if not digests:
        (path / MANIFEST).unlink()
    return path


def refusal(path: Path, tmp_path: Path) -> str:
    """The error of converting it; the directory is as it was before."""
    before = sorted(os.listdir(tmp_path))
    with pytest.raises((ConversionError, ConfigError)) as caught:
        convert(path, tmp_path / "out", "hf" if path.name == "mcore" else "mcore")
    assert sorted(os.listdir(tmp_path)) == before
    return str(caught.value)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


@pytest.mark.dear
@pytest.mark.parametrize("kind", ["hf", "mcore"])
def test_a_flipped_bit_anywhere_is_found_and_its_file_or_tensor_named(
    made: Path, tmp_path: Path, kind: str
) -> None:
    path = copy_of(made, kind, tmp_path, digests=True)
    choose = random.Random(kind)
    tensors = json.loads((path / MANIFEST).read_text())["tensors"]
    for file in files_of(path):
        bits = 8 * file.stat().st_size
        for bit in [0, bits - 1, *(choose.randrange(bits) for _ in range(6))]:
            flip(file, bit)
            said = refusal(path, tmp_path)
            named = file.name in said or any(name in said for name in tensors)
            assert named and str(path) in said, (file.name, bit, said)
            try:
                assert not verify(path, made / kind).equal, (file.name, bit)
                assert not verify(made / "hf", path).equal, (file.name, bit)
            except (ConversionError, ConfigError) as error:
                assert str(path) in str(error)
            flip(file, bit)
    assert verify(path, made / "hf").equal


def test_a_flipped_bit_of_a_tensor_without_digests_is_found_by_comparing(
    made: Path, tmp_path: Path
) -> None:
    path = copy_of(made, "mcore", tmp_path, digests=False)
    file = path / "__0_1.distcp"
    flip(file, 8 * 2000)  # within the bytes of a tensor
    found = verify(path, made / "hf")
    assert found.summary == {"values": 1} and found.has_digests == (False, True)


def truncate_shard(path: Path) -> str:
    file = sorted([*path.glob("*.safetensors"), *path.glob("*.distcp")])[-1]
    os.truncate(file, file.stat().st_size - 2000)
    return file.name


def empty_shard(path: Path) -> str:
    file = sorted([*path.glob("*.safetensors"), *path.glob("*.distcp")])[0]
    file.write_bytes(b"")
    return file.name


def lose_shard(path: Path) -> str:
    file = sorted([*path.glob("*.safetensors"), *path.glob("*.distcp")])[-1]
    file.unlink()
    return file.name


def lose_config(path: Path) -> str:
    file = (path / "hf" if path.name == "mcore" else path) / "config.json"
    file.unlink()
    return "config.json"


def unknown_architecture(path: Path) -> str:
    file = (path / "hf" if path.name == "mcore" else path) / "config.json"
    fields = json.loads(file.read_text()) | {"model_type": "unheard_of"}
    file.write_text(json.dumps(fields))
    return "unheard_of"


def narrower_mlps_in_config(path: Path) -> str:
    """Rows would be left over of one matrix, and columns of the other."""
    file = (path / "hf" if path.name == "mcore" else path) / "config.json"
    fields = json.loads(file.read_text()) | {"intermediate_size": 16}
    file.write_text(json.dumps(fields))
    return "misshapen"


def other_shapes_in_config(path: Path) -> str:
    file = (path / "hf" if path.name == "mcore" else path) / "config.json"
    fields = json.loads(file.read_text()) | {"intermediate_size": 64}
    file.write_text(json.dumps(fields))
    return "misshapen"


def fewer_layers_in_config(path: Path) -> str:
    file = (path / "hf" if path.name == "mcore" else path) / "config.json"
    fields = json.loads(file.read_text()) | {"num_hidden_layers": 1, "layer_types": None}
    file.write_text(json.dumps(fields))
    return "misshapen" if path.name == "mcore" else "unexpected"


BOTH = (
    truncate_shard,
    empty_shard,
    lose_shard,
    lose_config,
    unknown_architecture,
    other_shapes_in_config,
    narrower_mlps_in_config,
    fewer_layers_in_config,
)


@pytest.mark.parametrize("digests", [True, False], ids=["digests", "no digests"])
@pytest.mark.parametrize("kind", ["hf", "mcore"])
@pytest.mark.parametrize("damage", BOTH)
def test_damage_of_either_format_is_refused_by_name(
    made: Path, tmp_path: Path, damage: Damage, kind: str, digests: bool
) -> None:
    path = copy_of(made, kind, tmp_path, digests)
    named = damage(path)
    said = refusal(path, tmp_path)
    assert named in said or (digests and MANIFEST in said), said


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(file: Path, header: str, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def first_file(path: Path) -> Path:
    return min(path.glob("*.safetensors"))


def corrupt_header(path: Path) -> str:
    file = first_file(path)
    header, data = header_of(file)
    write_raw(file, json.dumps(header)[:-5], data)
    return file.name


def endless_header(path: Path) -> str:
    file = first_file(path)
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 2**62) + content[8:])
    return file.name


def tensor_twice_in_a_header(path: Path) -> str:
    file = first_file(path)
    header, data = header_of(file)
    name = next(name for name in header if name != "__metadata__")
    again = json.dumps({name: header[name]})[1:-1]
    write_raw(file, json.dumps(header)[:-1] + f", {again}}}", data)
    return name


def tensor_in_two_files(path: Path) -> str:
    first, second = sorted(path.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    return second.name


def tensor_twice_in_the_index(path: Path) -> str:
    text = (path / INDEX).read_text()
    name, file = next(iter(json.loads(text)["weight_map"].items()))
    (path / INDEX).write_text(
        text.replace('"weight_map": {', f'"weight_map": {{"{name}": "{file}",')
    )
    return name


def tensors_that_share_bytes(path: Path) -> str:
    file = first_file(path)
    header, data = header_of(file)
    by_size: dict[tuple[int, ...], str] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        other = by_size.setdefault(tuple(entry["shape"]), name)
        if other != name:
            entry["data_offsets"] = header[other]["data_offsets"]
            write_raw(file, json.dumps(header), data)
            return name
    raise AssertionError("no two tensors of one shape")


def bytes_of_nobody(path: Path) -> str:
    file = first_file(path)
    file.write_bytes(file.read_bytes() + bytes(64))
    return file.name


def negative_shape(path: Path) -> str:
    file = first_file(path)
    header, data = header_of(file)
    entry = next(entry for name, entry in header.items() if len(entry.get("shape", ())) == 2)
    entry["shape"] = [-n for n in entry["shape"]]
    write_raw(file, json.dumps(header), data)
    return file.name


def wrong_shape(path: Path) -> str:
    file = first_file(path)
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name][:-1].clone()}, file)
    return name


def integer_tensor(path: Path) -> str:
    file = first_file(path)
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].to(torch.int32)}, file)
    return name


HF_ONLY = (
    corrupt_header,
    endless_header,
    tensor_twice_in_a_header,
    tensor_in_two_files,
    tensor_twice_in_the_index,
    tensors_that_share_bytes,
    bytes_of_nobody,
    negative_shape,
    wrong_shape,
    integer_tensor,
)


@pytest.mark.parametrize("damage", HF_ONLY)
def test_damage_of_safetensors_is_refused_by_name(
    made: Path, tmp_path: Path, damage: Damage
) -> None:
    path = copy_of(made, "hf", tmp_path, digests=False)
    named = damage(path)
    assert named in refusal(path, tmp_path)


class Evil:
    """What a pickle can do to whoever reads it unprotected."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil-was-here",)


def evil_metadata(path: Path) -> str:
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    return "mkdir"


def garbled_metadata(path: Path) -> str:
    (path / ".metadata").write_bytes(b"not a pickle at all")
    return ".metadata"


def cut_metadata(path: Path) -> str:
    content = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(content[: len(content) // 2])
    return ".metadata"


def no_metadata(path: Path) -> str:
    (path / ".metadata").unlink()
    return ".metadata"


def no_format(path: Path) -> str:
    (path / "metadata.json").unlink()
    return "metadata.json"


def other_format(path: Path) -> str:
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    return "zarr"


def change_metadata(path: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


KEY = "decoder.layers.mlp.linear_fc2.weight"


def lose_a_key(path: Path) -> str:
    change_metadata(path, lambda metadata: metadata.state_dict_metadata.pop(KEY))
    return KEY


def add_a_key(path: Path) -> str:
    def add(metadata: Any) -> None:
        metadata.state_dict_metadata["decoder.layers.mystery"] = metadata.state_dict_metadata[KEY]
        for index, place in list(metadata.storage_data.items()):
            if index.fqn == KEY:
                other = type(index)("decoder.layers.mystery", index.offset)
                metadata.storage_data[other] = place

    change_metadata(path, add)
    return "decoder.layers.mystery"


def lose_a_chunk(path: Path) -> str:
    change_metadata(path, lambda metadata: metadata.state_dict_metadata[KEY].chunks.pop())
    return KEY


def repeat_a_chunk(path: Path) -> str:
    def repeat(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[KEY].chunks
        chunks[1] = chunks[0]

    change_metadata(path, repeat)
    return KEY


def lose_a_place(path: Path) -> str:
    def lose(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == KEY)
        del metadata.storage_data[index]

    change_metadata(path, lose)
    return KEY


def swap_records(path: Path) -> str:
    """Records of tensors of other shapes."""

    def swap(metadata: Any) -> None:
        one, other = (
            next(i for i in metadata.storage_data if i.fqn == key)
            for key in (KEY, "decoder.final_layernorm.weight")
        )
        data = metadata.storage_data
        data[one], data[other] = data[other], data[one]

    change_metadata(path, swap)
    return ".distcp"


def leave_the_directory(path: Path) -> str:
    def leave(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = "../" + place.relative_path

    change_metadata(path, leave)
    return "../__0_0.distcp"


def corrupt_record(path: Path) -> str:
    """The frame around a tensor's bytes."""
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[:600] = bytes(600)
    end = len(content) - 100_000
    for start in range(max(0, end), len(content) - 4):
        if content[start : start + 4] == b"PK\1\2":
            content[start : start + 4] = b"XXXX"
    file.write_bytes(content)
    return file.name


def metadata_that_marks_a_class(path: Path) -> str:
    """It asks for an attribute of a class it names, and is a valid one else."""
    mark = b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x06markedK\1s\x86b0"
    content = pickle.dumps(pickle.loads((path / ".metadata").read_bytes()), 2)
    (path / ".metadata").write_bytes(content[:2] + mark + content[2:])
    return ".metadata"


MCORE_ONLY = (
    evil_metadata,
    metadata_that_marks_a_class,
    garbled_metadata,
    cut_metadata,
    no_metadata,
    no_format,
    other_format,
    lose_a_key,
    add_a_key,
    lose_a_chunk,
    repeat_a_chunk,
    lose_a_place,
    swap_records,
    leave_the_directory,
    corrupt_record,
)


@pytest.mark.parametrize("damage", MCORE_ONLY)
def test_damage_of_sharded_checkpoints_is_refused_by_name(
    made: Path, tmp_path: Path, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of(made, "mcore", tmp_path, digests=False)
    monkeypatch.chdir(tmp_path)
    named = damage(path)
    said = refusal(path, tmp_path)
    assert named in said, said
    assert not hasattr(Metadata, "marked")


def test_state_of_the_optimizer_beside_the_weights_is_passed_over(
    made: Path, tmp_path: Path
) -> None:
    path = copy_of(made, "mcore", tmp_path, digests=False)

    def add(metadata: Any) -> None:
        state = metadata.state_dict_metadata
        for name in ("optimizer.state.exp_avg." + KEY, "chained_0.optimizer.state.step"):
            state[name] = state[KEY]
            for index, place in list(metadata.storage_data.items()):
                if index.fqn == KEY:
                    metadata.storage_data[type(index)(name, index.offset)] = place

    change_metadata(path, add)
    assert verify(path, made / "hf").equal


def test_a_file_of_that_name_makes_no_hf_checkpoint_one_of_megatron_core(
    made: Path, tmp_path: Path
) -> None:
    path = copy_of(made, "hf", tmp_path, digests=False)
    (path / "metadata.json").write_text('{"made_by": "somebody"}')
    assert verify(path, made / "mcore").equal


@pytest.mark.parametrize("name", ["nowhere", "a-file", "empty"])
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "a-file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=name):
        convert(tmp_path / name, tmp_path / "out", "mcore")
    assert sorted(os.listdir(tmp_path)) == ["a-file", "empty"]


def test_a_run_that_names_a_checkpoint_it_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    with pytest.raises(ConfigError, match="iter_0000012"):
        convert(tmp_path, tmp_path / "out", "hf")
