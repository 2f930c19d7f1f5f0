"""The `.metadata` of a `torch_dist` checkpoint: which tensors there are, and where their bytes are.

It is a pickle that can come from an untrusted source: nothing in it is trusted to be what it
claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_policy.converters.files.contained import inside, read
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.errors import ConversionError

from .dist_keys import OPTIMIZER_STATE
from .stored import tiled, tiled_in_part
from .unpickled import Made, Name, unpickled

METADATA = ".metadata"
MAX_BYTES = 2**30
"""Size limit of the file: ten times that of a hundred thousand tensors in a million chunks."""
MAX_DIMENSIONS = 64
"""The maximum for torch tensors."""

_TORCH = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
_DTYPES = {name: dtype for name, dtype in _TORCH.items() if isinstance(dtype, torch.dtype)}
_CHECKPOINT = "torch.distributed.checkpoint."
_CLASSES = {
    "metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "filesystem": ("_StorageInfo",),
    "planner": (
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    ),
}
_KNOWN = {Name(_CHECKPOINT + module, each) for module, all_ in _CLASSES.items() for each in all_}
_KNOWN |= {Name("torch", name) for name in ("Size", *_TORCH)}
_KNOWN |= {
    Name("torch.serialization", "_get_layout"),
    Name("builtins", "getattr"),  # some Python versions pickle enum members this way
    Name("collections", "OrderedDict"),
}
_PACKAGES = ("pathlib", "megatron")
"""Packages of which any name is allowed: paths, and what older versions record about flattening."""


@dataclass(frozen=True)
class Key:
    """A tensor of the checkpoint: its chunks, (origin, sizes) each, and where their records are."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[tuple[Shape, Shape], ...]
    records: tuple[tuple[Path, int, int], ...]
    """(file, offset, length) of each chunk."""


class RecordLocation(NamedTuple):
    """Where a record is, and whether it is encoded."""

    file: str
    offset: int
    length: int
    encoded: bool


_Where = tuple[Path, int, int]


def read_metadata(root: Path) -> tuple[dict[str, Key], dict[str, _Where]]:
    """Tensors by key, and (file, offset, length) of objects by name.

    ConversionError when the file is damaged, or what it says of the files next to it is wrong.
    """
    path = root / METADATA
    try:
        found = _state(unpickled(read(path, MAX_BYTES), _belongs), "metadata", "Metadata")
        held, stored = found["state_dict_metadata"], found["storage_data"]
        places = dict(_places(stored))
        if sum(len(chunks) for chunks in _all_chunks(held)) > len(places):
            raise ValueError("it has more chunks than records")
        _check_files(root, places.values())
        keys: dict[str, Key] = {}
        objects: dict[str, _Where] = {}
        for name, described in held.items():
            key = _text(name)
            if _is(described, "metadata", "TensorStorageMetadata"):
                keys[key] = _key(root, key, described.state, places)
            elif (key, ()) in places:
                place = places[key, ()]
                objects[key] = (root / place.file, place.offset, place.length)
        return keys, objects
    except ConversionError:
        raise
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConversionError(f"{path} is unreadable: its values are nested too deeply") from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ConversionError(f"{path} is unreadable: {error}") from error


def _belongs(name: Name) -> bool:
    return name in _KNOWN or name.module.split(".")[0] in _PACKAGES


def _state(value: Any, module: str, name: str) -> dict[str, Any]:
    """The state of an object of that torch class."""
    if not _is(value, module, name) or type(value.state) is not dict:
        raise ValueError(f"expected a {name}, found {_kind(value)}")
    return value.state


def _kind(value: Any) -> str:
    """What a value is, in words of bounded length: the repr of nested tuples has no bound."""
    return f"a {value.by!s:.200}" if type(value) is Made else f"a {type(value).__name__}"


def _is(value: Any, module: str, name: str) -> bool:
    return type(value) is Made and value.by == Name(_CHECKPOINT + module, name)


def _places(stored: dict[Made, Made]) -> Iterator[tuple[tuple[str, Shape], RecordLocation]]:
    for index, where in stored.items():
        at = _state(index, "metadata", "MetadataIndex")
        info = _state(where, "filesystem", "_StorageInfo")
        offset = at.get("offset")
        yield (
            (_text(at["fqn"]), () if offset is None else _size(offset)),
            RecordLocation(
                _text(info["relative_path"]),
                _count(info["offset"]),
                _count(info["length"]),
                bool(info.get("transform_descriptors")),
            ),
        )


def _all_chunks(held: dict[str, Made]) -> Iterator[list[Made]]:
    """Of each tensor; several tensors can share one list of chunks."""
    for described in held.values():
        if _is(described, "metadata", "TensorStorageMetadata"):
            chunks = _state(described, "metadata", "TensorStorageMetadata")["chunks"]
            if type(chunks) is not list:
                raise ValueError("the chunks of a tensor are not a list")
            yield chunks


def _check_files(root: Path, places: Iterable[RecordLocation]) -> None:
    """Raise ConversionError if a file is missing or ends before its last record of any kind."""
    ends: dict[str, int] = {}
    for place in places:
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    for name, end in ends.items():
        path = root / name
        if path.parent != root or not path.name:
            raise ConversionError(f"{root / METADATA} names {name}, which is not next to it")
        inside(root, name)
        if not path.is_file():
            raise ConversionError(f"{root} lacks {name}, which its {METADATA} names")
        if path.stat().st_size < end:
            raise ConversionError(
                f"{path} is truncated: it has {path.stat().st_size} bytes, but its records end "
                f"at {end}. Copy or save the checkpoint again."
            )


def _key(
    root: Path,
    name: str,
    held: Mapping[str, Any],
    places: Mapping[tuple[str, Shape], RecordLocation],
) -> Key:
    dtype, shape = _dtype(held["properties"]), _size(held["size"])
    states = [_state(chunk, "metadata", "ChunkStorageMetadata") for chunk in held["chunks"]]
    chunks = tuple((_size(state["offsets"]), _size(state["sizes"])) for state in states)
    # Layers that were not trained have no optimizer state.
    partly = name.startswith(OPTIMIZER_STATE) and bool(shape) and tiled_in_part(shape, chunks)
    if not (partly or tiled(shape, chunks)):
        raise ConversionError(f"{root / METADATA}: the chunks of {name} do not fill {list(shape)}")
    records = []
    for origin, sizes in chunks:
        place = places.get((name, origin))
        if place is None:
            raise ConversionError(f"{root / METADATA}: it names no file for {name} {origin}")
        if place.encoded:
            raise ConversionError(f"{root / METADATA}: {name} is encoded, which cannot be read")
        if place.length < math.prod(sizes) * dtype.itemsize:
            raise ConversionError(
                f"{root / METADATA}: {name} {origin} is {list(sizes)} {dtype}, which does not fit "
                f"into its {place.length} bytes of {place.file}"
            )
        records.append((root / place.file, place.offset, place.length))
    return Key(dtype, shape, chunks, tuple(records))


def _dtype(properties: Any) -> torch.dtype:
    """The first item of the properties' state, or its `dtype` field."""
    if _is(properties, "metadata", "TensorProperties"):
        state = properties.state
        dtype = state["dtype"] if type(state) is dict else state[0]
        if type(dtype) is Name and dtype.module == "torch" and dtype.name in _DTYPES:
            return _DTYPES[dtype.name]
    raise ValueError("a tensor's properties name no dtype")


def _size(value: Any) -> Shape:
    """The numbers of a torch.Size."""
    if type(value) is Made and value.by == Name("torch", "Size") and len(value.arguments) == 1:
        (value,) = value.arguments
    if type(value) not in (tuple, list) or len(value) > MAX_DIMENSIONS:
        raise ValueError(f"expected a shape, found {_kind(value)}")
    return tuple(map(_count, value))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        said = value if type(value) is int else _kind(value)
        raise ValueError(f"expected a size or an offset, found {said}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a name, found {_kind(value)}")
    return value
