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
from tests.unit.edited import set_fields

SMALL = {"layers": 2, "vocab": 250, "hidden": 32, "heads": 2, "groups": 1, "ffn": 48}
KEY = "decoder.layers.mlp.linear_fc2.weight"
Damage = Callable[[Path], str]
"""Does something to a checkpoint, and returns what the error has to name."""


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory) -> Path:
    """A directory with the same model in both formats, with digests and in several files: `hf` and
    `mcore`.
    """
    folder = tmp_path_factory.mktemp("made")
    path = checkpoint("qwen2", dtype="bfloat16", **SMALL)
    convert(path, folder / "mcore", "mcore", max_shard_size=50_000)
    convert(folder / "mcore", folder / "hf", "hf", max_shard_size=40_000)
    assert min(len(shards(folder / kind)) for kind in ("mcore", "hf")) > 1
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


@pytest.mark.dear
@pytest.mark.parametrize("kind", ["hf", "mcore"])
def test_a_flipped_bit_anywhere_is_found_and_its_file_or_tensor_named(made, tmp_path, kind) -> None:
    path = copy_of(made, kind, tmp_path, digests=True)
    choose = random.Random(f"bits of {kind}")
    tensors = json.loads((path / MANIFEST).read_text())["tensors"]
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        bits = 8 * file.stat().st_size
        for bit in [0, bits - 1, *(choose.randrange(bits) for _ in range(2))]:
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


def test_a_flipped_bit_of_a_tensor_without_digests_is_found_by_comparing(made, tmp_path) -> None:
    path = copy_of(made, "mcore", tmp_path, digests=False)
    flip(path / "__0_1.distcp", 8 * 2000)  # within the bytes of a tensor
    found = verify(path, made / "hf")
    assert found.summary == {"values": 1} and found.has_digests == (False, True)


def shards(path: Path) -> list[Path]:
    return sorted([*path.glob("*.safetensors"), *path.glob("*.distcp")])


def overwrite(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    return file.name


def lose(file: Path) -> str:
    file.unlink()
    return file.name


def edit_config(path: Path, named: str, **fields: Any) -> str:
    set_fields(config_of(path), **fields)
    return named


def config_of(path: Path) -> Path:
    return (path / "hf" if path.name == "mcore" else path) / "config.json"


def fewer_layers(path: Path) -> str:
    named = "misshapen" if path.name == "mcore" else "unexpected"
    return edit_config(path, named, num_hidden_layers=1, layer_types=None)


BOTH: dict[str, Damage] = {
    "truncated shard": lambda path: overwrite(
        shards(path)[-1], shards(path)[-1].read_bytes()[:-2000]
    ),
    "empty shard": lambda path: overwrite(shards(path)[0], b""),
    "lost shard": lambda path: lose(shards(path)[-1]),
    "lost config": lambda path: lose(config_of(path)),
    "unknown family": lambda path: edit_config(path, "unheard_of", model_type="unheard_of"),
    # Rows would be left over of one matrix, and columns of the other.
    "narrower MLPs": lambda path: edit_config(path, "misshapen", intermediate_size=16),
    "wider MLPs": lambda path: edit_config(path, "misshapen", intermediate_size=64),
    "fewer layers": fewer_layers,
}


@pytest.mark.parametrize("digests", [True, False], ids=["digests", "no digests"])
@pytest.mark.parametrize("kind", ["hf", "mcore"])
@pytest.mark.parametrize("damage", BOTH)
def test_damage_of_either_format_is_refused_by_name(made, tmp_path, damage, kind, digests) -> None:
    path = copy_of(made, kind, tmp_path, digests)
    named = BOTH[damage](path)
    said = refusal(path, tmp_path)
    assert named in said or (digests and MANIFEST in said), said


def write_raw(file: Path, header: str, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def first_file(path: Path) -> tuple[Path, dict[str, Any], bytes]:
    """A file of tensors, its header, and what follows."""
    file = shards(path)[0]
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    del header["__metadata__"]
    return file, header, content[end:]


def cut_header(path: Path) -> str:
    file, header, data = first_file(path)
    write_raw(file, json.dumps(header)[:-5], data)
    return file.name


def endless_header(path: Path) -> str:
    file = shards(path)[0]
    return overwrite(file, struct.pack("<Q", 2**62) + file.read_bytes()[8:])


def tensor_twice_in_a_header(path: Path) -> str:
    file, header, data = first_file(path)
    name, entry = next(iter(header.items()))
    write_raw(file, f"{json.dumps(header)[:-1]}, {json.dumps({name: entry})[1:]}", data)
    return name


def tensor_in_two_files(path: Path) -> str:
    first, second = shards(path)[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    return second.name


def tensor_twice_in_the_index(path: Path) -> str:
    text = (path / INDEX).read_text()
    name, file = next(iter(json.loads(text)["weight_map"].items()))
    text = text.replace('"weight_map": {', f'"weight_map": {{"{name}": "{file}",')
    (path / INDEX).write_text(text)
    return name


def tensors_that_share_bytes(path: Path) -> str:
    file, header, data = first_file(path)
    by_size: dict[tuple[int, ...], str] = {}
    for name, entry in header.items():
        other = by_size.setdefault(tuple(entry["shape"]), name)
        if other != name:
            entry["data_offsets"] = header[other]["data_offsets"]
            write_raw(file, json.dumps(header), data)
            return name
    raise AssertionError("no two tensors of one shape")


def negative_shape(path: Path) -> str:
    file, header, data = first_file(path)
    entry = next(entry for entry in header.values() if len(entry["shape"]) == 2)
    entry["shape"] = [-n for n in entry["shape"]]
    write_raw(file, json.dumps(header), data)
    return file.name


def change_tensor(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> str:
    file = shards(path)[0]
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: change(tensors[name])}, file)
    return name


HF_ONLY: dict[str, Damage] = {
    "cut header": cut_header,
    "endless header": endless_header,
    "tensor twice in a header": tensor_twice_in_a_header,
    "tensor in two files": tensor_in_two_files,
    "tensor twice in the index": tensor_twice_in_the_index,
    "tensors that share bytes": tensors_that_share_bytes,
    "bytes of nobody": lambda path: overwrite(
        shards(path)[0], shards(path)[0].read_bytes() + bytes(64)
    ),
    "negative shape": negative_shape,
    "wrong shape": lambda path: change_tensor(path, lambda tensor: tensor[:-1].clone()),
    "integer tensor": lambda path: change_tensor(path, torch.Tensor.int),
}


@pytest.mark.parametrize("damage", HF_ONLY)
def test_damage_of_safetensors_is_refused_by_name(made: Path, tmp_path, damage: str) -> None:
    path = copy_of(made, "hf", tmp_path, digests=False)
    assert HF_ONLY[damage](path) in refusal(path, tmp_path)


class Evil:
    """What a pickle can do to whoever reads it unprotected."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil-was-here",)


def make_evil(path: Path) -> str:
    overwrite(path / ".metadata", pickle.dumps(Evil()))
    return "mkdir"


def mark_a_class(path: Path) -> str:
    """It asks for an attribute of a class it names, and is a valid one else."""
    mark = b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x06markedK\1s\x86b0"
    content = pickle.dumps(pickle.loads((path / ".metadata").read_bytes()), 2)
    return overwrite(path / ".metadata", content[:2] + mark + content[2:])


def cut_metadata(path: Path) -> str:
    content = (path / ".metadata").read_bytes()
    return overwrite(path / ".metadata", content[: len(content) // 2])


def name_another_format(path: Path) -> str:
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    return "metadata.json says that this is a 'zarr' checkpoint"


def change_metadata(path: Path, change: Callable[[Any], object], named: str = KEY) -> str:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return named


def chunks_of(metadata: Any) -> list[Any]:
    return metadata.state_dict_metadata[KEY].chunks  # type: ignore[no-any-return]


def place_of(metadata: Any, key: str = KEY) -> Any:
    return next(index for index in metadata.storage_data if index.fqn == key)


def copy_key(metadata: Any, name: str) -> None:
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata[KEY]
    for index, place in list(metadata.storage_data.items()):
        if index.fqn == KEY:
            metadata.storage_data[type(index)(name, index.offset)] = place


def swap_records(metadata: Any) -> None:
    """Records of tensors of other shapes."""
    one, other = place_of(metadata), place_of(metadata, "decoder.final_layernorm.weight")
    data = metadata.storage_data
    data[one], data[other] = data[other], data[one]


def leave_the_directory(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path


def corrupt_record(path: Path) -> str:
    """The frame around a tensor's bytes."""
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    return overwrite(file, bytes(600) + content[600:].replace(b"PK\1\2", b"XXXX"))


MYSTERY = "decoder.layers.mystery"
MCORE_ONLY: dict[str, Damage] = {
    "evil metadata": make_evil,
    "marks a class": mark_a_class,
    "garbled metadata": lambda path: overwrite(path / ".metadata", b"not a pickle at all"),
    "cut metadata": cut_metadata,
    "no metadata": lambda path: lose(path / ".metadata"),
    "no format": lambda path: lose(path / "metadata.json"),
    "other format": name_another_format,
    "lost key": lambda path: change_metadata(path, lambda m: m.state_dict_metadata.pop(KEY)),
    "key too many": lambda path: change_metadata(path, lambda m: copy_key(m, MYSTERY), MYSTERY),
    "lost chunk": lambda path: change_metadata(path, lambda m: chunks_of(m).pop()),
    "chunk twice": lambda path: change_metadata(
        path, lambda m: chunks_of(m).__setitem__(1, chunks_of(m)[0])
    ),
    "lost place": lambda path: change_metadata(path, lambda m: m.storage_data.pop(place_of(m))),
    "swapped records": lambda path: change_metadata(path, swap_records, ".distcp"),
    "out of the directory": lambda path: change_metadata(
        path, leave_the_directory, "../__0_0.distcp"
    ),
    "corrupt record": corrupt_record,
}


@pytest.mark.parametrize("damage", MCORE_ONLY)
def test_damage_of_sharded_checkpoints_is_refused_by_name(
    made: Path, tmp_path, damage: str, monkeypatch
) -> None:
    path = copy_of(made, "mcore", tmp_path, digests=False)
    monkeypatch.chdir(tmp_path)
    named = MCORE_ONLY[damage](path)
    said = refusal(path, tmp_path)
    assert named in said, said
    assert not hasattr(Metadata, "marked")


def test_state_of_the_optimizer_beside_the_weights_is_passed_over(made, tmp_path) -> None:
    path = copy_of(made, "mcore", tmp_path, digests=False)
    for name in ("optimizer.state.exp_avg." + KEY, "chained_0.optimizer.state.step"):
        change_metadata(path, lambda metadata, name=name: copy_key(metadata, name))
    assert verify(path, made / "hf").equal


def test_a_file_of_that_name_makes_no_hf_checkpoint_one_of_megatron_core(made, tmp_path) -> None:
    path = copy_of(made, "hf", tmp_path, digests=False)
    (path / "metadata.json").write_text('{"made_by": "somebody"}')
    assert verify(path, made / "mcore").equal


@pytest.mark.parametrize("name", ["nowhere", "a-file", "empty", "iter_0000012"])
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, name: str) -> None:
    """Also a checkpoint that only its run names."""
    (tmp_path / "a-file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match=name):
        source = tmp_path if name.startswith("iter") else tmp_path / name
        convert(source, tmp_path / "out", "hf" if source == tmp_path else "mcore")
    assert sorted(os.listdir(tmp_path)) == before
