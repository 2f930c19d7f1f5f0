"""Megatron-Core's sharded checkpoint format `torch_dist`, read: keys, and where their bytes are.

The one place, with dist_writing.py, that knows how `torch.distributed.checkpoint` keeps tensors in
files. Runs no process group and imports no Megatron-Core; knows no model family.
"""

from __future__ import annotations

import io
import json
import math
import pathlib
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_policy.errors import ConfigError, ConversionError

from .architecture import Architecture
from .blocks import Shape
from .dist_keys import Place, not_weights, readable
from .dist_records import data_offset
from .raw_files import RawFiles
from .rows import Vocab
from .stored import Chunk, Stored, tiled
from .table import Entry

METADATA, FORMAT = ".metadata", "metadata.json"
_LATEST = "latest_checkpointed_iteration.txt"

# A gated MLP's two halves are keys of their own where Megatron-Core was told to write them so.
_HALVES = ("_w", "_v")

_CLASSES = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.TensorProperties,
        metadata.ChunkStorageMetadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        planner.SavePlan,
        planner.WriteItem,
        planner.WriteItemType,
        planner.TensorWriteData,
        planner.BytesIOWriteData,
        torch.Size,
    )
}


@dataclass(frozen=True)
class Key:
    """A tensor of the checkpoint: where the records of its chunks, (origin, sizes) each, are."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[tuple[Shape, Shape], ...]
    records: tuple[tuple[Path, int, int], ...]
    """(file, offset, length) of each chunk."""


def find(path: str | Path) -> Path | None:
    """The directory of the sharded checkpoint: `path`, or what a training run saved last in it.

    None when it is none; ConfigError when it looks like one and is not complete.
    """
    root = Path(path).expanduser()
    if (root / METADATA).is_file() or b"sharded_backend" in _content(root / FORMAT):
        _check_format(root)
        return root
    if not (root / _LATEST).is_file():
        return root / "release" if (root / "release" / FORMAT).is_file() else None
    latest = (root / _LATEST).read_text(encoding="utf-8", errors="replace").strip()
    name = f"iter_{int(latest):07d}" if latest.isdecimal() else latest
    if latest and (root / name).is_dir():
        _check_format(root / name)
        return root / name
    raise ConfigError(f"{root / _LATEST} names {latest!r}, but there is no {root / name}")


class DistReader:
    """The tensors of a sharded checkpoint by key.

    ConversionError when files are missing, truncated, damaged, or contradict each other.
    """

    def __init__(self, root: Path, files: RawFiles) -> None:
        self.root, self._files = root, files
        self.keys, self.objects = _read_metadata(root)
        self._by_lead = cache(self._chunks_by_lead)

    def parameter(
        self, entry: Entry, arch: Architecture, prefix: str = ""
    ) -> tuple[str, Stored] | None:
        """The first key of the entry's parameter that the checkpoint has, and the parameter there.

        A vocabulary may have more rows in the file: padding, which is left out. None when the
        checkpoint has no such key. `prefix` stands before the keys of an optimizer's state.
        """
        rows, *tail = entry.row.local_shape(arch, 1)
        shape = (rows - entry.row.pad_rows(arch, 0, 1), *tail)
        places = (replace(place, key=prefix + place.key) for place in readable(entry, arch))
        return self._find(places, shape, padded=isinstance(entry.row, Vocab))

    def object_bytes(self, name: str) -> bytes | None:
        """The record of an object, as it stands in its file; None if there is none."""
        where = self.objects.get(name)
        return None if where is None else self._files.read_bytes(*where)

    def unused(self, entries: Iterable[Entry], arch: Architecture) -> list[str]:
        """The keys of weights that belong to none of the entries."""
        used = {place.key for entry in entries for place in readable(entry, arch)}
        used |= {key + half for key in used for half in _HALVES}
        return [key for key in self.weights() if key not in used]

    def weights(self) -> list[str]:
        """All keys that are of weights, not of an optimizer or of counters."""
        return sorted(set(self.keys) - not_weights(self.keys))

    def _find(
        self, places: Iterable[Place], shape: Shape, padded: bool
    ) -> tuple[str, Stored] | None:
        for place in places:
            halves = [place.key + half for half in _HALVES]
            if place.key in self.keys:
                keys = [place.key]
            elif all(key in self.keys for key in halves):
                keys = halves
            else:
                continue
            chunks: list[Chunk] = []
            rows = 0
            for key in keys:
                held = self._shape_of(key, place)
                chunks += [
                    chunk._replace(origin=(chunk.origin[0] + rows, *chunk.origin[1:]))
                    if rows
                    else chunk
                    for chunk in self._by_lead(key, len(place.lead)).get(place.lead, ())
                ]
                rows += held[0] if held else 1
            found = (rows, *held[1:]) if held else held
            fits = found[:1] >= shape[:1] if padded else found[:1] == shape[:1]
            if found[1:] != shape[1:] or not fits:
                raise ConversionError(
                    f"misshapen: {keys[0]} in {self.root} is {list(found)} for each parameter, must"
                    f" be {list(shape)}; is this the checkpoint of that config.json?"
                )
            return keys[0], Stored(shape, self.keys[keys[0]].dtype, chunks)
        return None

    def _shape_of(self, key: str, place: Place) -> Shape:
        shape = self.keys[key].shape
        if shape[: len(place.axes)] != place.axes or len(shape) < len(place.axes):
            raise ConversionError(
                f"misshapen: {key} in {self.root} is {list(shape)}, must start with "
                f"{list(place.axes)}; is this the checkpoint of that config.json?"
            )
        return shape[len(place.axes) :]

    def _chunks_by_lead(self, key: str, depth: int) -> dict[Shape, list[Chunk]]:
        """Of a key, the chunks of each parameter: those with its `depth` leading indices."""
        held = self.keys[key]
        made: dict[Shape, list[Chunk]] = {}
        for (origin, sizes), (path, offset, length) in zip(held.chunks, held.records, strict=True):
            start = data_offset(self._files, path, offset, length, held.dtype, sizes)
            inner = math.prod(sizes[depth:]) * held.dtype.itemsize
            for number in range(math.prod(sizes[:depth])):
                lead: list[int] = []
                rest = number
                for at, n in reversed(list(zip(origin[:depth], sizes[:depth], strict=True))):
                    rest, index = divmod(rest, n)
                    lead.insert(0, at + index)
                chunk = Chunk(path, start + number * inner, origin[depth:], sizes[depth:])
                made.setdefault(tuple(lead), []).append(chunk)
        return made


def _content(path: Path) -> bytes:
    """What the file holds, nothing if there is none."""
    return path.read_bytes() if path.is_file() else b""


def _check_format(root: Path) -> None:
    for name in (FORMAT, METADATA):
        if not (root / name).is_file():
            raise ConfigError(f"{root} has no {name}: the checkpoint was not written to its end")
    try:
        backend = json.loads((root / FORMAT).read_bytes())["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{root / FORMAT} is unreadable: {error!r}") from error
    if backend != "torch_dist":
        raise ConfigError(f"{root} is a {backend!r} checkpoint; only 'torch_dist' can be read")


_Where = tuple[Path, int, int]


def _read_metadata(root: Path) -> tuple[dict[str, Key], dict[str, _Where]]:
    """Tensors by key, and (file, offset, length) of objects by name."""
    path = root / METADATA
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        places = {(at.fqn, tuple(at.offset or ())): info for at, info in found.storage_data.items()}
        _check_sizes(root, found.storage_data.values())
        keys, objects = {}, {}
        for key, held in found.state_dict_metadata.items():
            if isinstance(held, metadata.TensorStorageMetadata):
                keys[key] = _key(root, key, held, places)
            elif (key, ()) in places:
                info = places[key, ()]
                objects[key] = (root / info.relative_path, info.offset, info.length)
        return keys, objects
    except ConversionError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ConversionError(f"{path} is unreadable: {type(error).__name__}: {error}") from error


def _check_sizes(root: Path, places: Iterable[Any]) -> None:
    """ConversionError if a file is missing or ends before its last record, whatever that holds."""
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(
            ends.get(place.relative_path, 0), place.offset + place.length
        )
    for name, end in ends.items():
        path = root / name
        if path.parent != root:
            raise ConversionError(f"{root / METADATA} names {name}, which is not beside it")
        if not path.is_file():
            raise ConversionError(f"{root} lacks {name}, which its {METADATA} names")
        if path.stat().st_size < end:
            raise ConversionError(
                f"{path} is truncated: it has {path.stat().st_size} bytes, its records end at "
                f"{end}. Copy or save the checkpoint again."
            )


def _key(root: Path, name: str, held: Any, places: Mapping[Any, Any]) -> Key:
    chunks = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in held.chunks)
    shape = tuple(held.size)
    if not tiled(shape, chunks):
        raise ConversionError(f"{root / METADATA}: the chunks of {name} do not fill {list(shape)}")
    records = []
    for origin, _ in chunks:
        info = places.get((name, origin))
        if info is None:
            raise ConversionError(f"{root / METADATA}: no file is said to hold {name} {origin}")
        if getattr(info, "transform_descriptors", None):
            raise ConversionError(f"{root / METADATA}: {name} is encoded, which cannot be read")
        records.append((root / info.relative_path, info.offset, info.length))
    return Key(held.properties.dtype, shape, chunks, tuple(records))


class _Unpickler(pickle.Unpickler):
    """Reads what such a file consists of, and runs nothing else that a pickle can name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(
            found := getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)
        ):
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if module.split(".")[0] == "pathlib" and name in vars(pathlib):
            return pathlib.PurePosixPath
        if (module, name) == ("builtins", "getattr"):  # how some Pythons pickle members of enums
            return _member
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module.startswith("megatron."):  # older versions note what they flattened
            return type(name, (), {})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong there")


def _member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it asks for {name} of {kind!r}")
    return kind[name]
