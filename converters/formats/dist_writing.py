"""Writes Megatron-Core's sharded checkpoint format `torch_dist`: where everything goes, and the
framing around the tensors' bytes.

Needs no process group and does not import Megatron-Core.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_policy.converters.rows.blocks import Shape

from .dist_files import FORMAT
from .dist_keys import KeyedSlice
from .dist_metadata import METADATA
from .dist_records import empty_object, framing
from .stored import Chunk, Stored

if TYPE_CHECKING:
    from torch.distributed.checkpoint import metadata

CHUNK_BYTES = 16 * 2**20
"""Limit for the tensor in a record: a loading rank reads a whole record to take its own rows."""

COMMON = "common.pt"


@dataclass(frozen=True)
class Parameter:
    """A parameter to write: its place, its dtype there, its shape."""

    place: KeyedSlice
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class Record:
    """One record: `sizes` elements of `key` at `origin`, or an object if it has no dtype."""

    key: str
    dtype: torch.dtype | None
    origin: Shape
    sizes: Shape
    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class DistLayout:
    """All records of a planned checkpoint, and where each parameter's elements lie in them."""

    records: tuple[Record, ...]
    shapes: dict[str, Shape]
    """Of each key."""
    stored: tuple[Stored, ...]
    """Of each parameter, in the order given."""

    @property
    def sizes(self) -> dict[Path, int]:
        """Bytes of each file."""
        return {record.path: record.offset + record.length for record in self.records}


def lay_out(
    parameters: Sequence[Parameter], objects: Iterable[str], max_file_bytes: int
) -> DistLayout:
    """Place parameters and objects one after another in files of at most `max_file_bytes`."""
    filler = _Filler(max_file_bytes)
    shapes: dict[str, Shape] = {}
    stored = []
    for parameter in parameters:
        place, dtype = parameter.place, parameter.dtype
        chunks = []
        for key, first, shape in place.divide(parameter.shape):
            shapes[key] = (*place.axes, *shape)
            for origin, sizes in _rows(shape, dtype.itemsize):
                full = (*(1 for _ in place.lead), *sizes)
                around = framing(dtype, full)
                data = math.prod(sizes) * dtype.itemsize
                length = len(around.prefix) + data + len(around.suffix)
                record = filler.add(key, dtype, (*place.lead, *origin), full, length)
                start = record.offset + len(around.prefix)
                chunks.append(Chunk(record.path, start, origin, sizes).lower(first))
        stored.append(Stored(parameter.shape, dtype, chunks))
    for name in objects:
        filler.add(name, None, (), (), len(empty_object()))
    return DistLayout(tuple(filler.records), shapes, tuple(stored))


def framing_of(layout: DistLayout) -> Iterator[tuple[Path, int, bytes]]:
    """(file, offset, bytes) of everything except the tensors' own bytes."""
    for record in layout.records:
        if record.dtype is None:
            yield record.path, record.offset, empty_object()
            continue
        prefix, suffix = framing(record.dtype, record.sizes)
        yield record.path, record.offset, prefix
        yield record.path, record.offset + record.length - len(suffix), suffix


def small_files(layout: DistLayout, common: dict[str, Any]) -> dict[str, bytes]:
    """Contents of the files next to the records, by name; `common` is unsharded state.

    FORMAT comes last: without it the others are not a checkpoint.
    """
    state = io.BytesIO()
    torch.save(common, state)
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    versions |= {"common_backend": "torch", "common_backend_version": 1}
    return {
        COMMON: state.getvalue(),
        METADATA: pickle.dumps(_metadata(layout), protocol=4),
        FORMAT: json.dumps(versions).encode(),
    }


def _metadata(layout: DistLayout) -> metadata.Metadata:
    # Imported here: it takes a second, and commands that write no checkpoint import this module.
    from torch.distributed.checkpoint import filesystem, metadata

    described: dict[str, Any] = {}
    places = {}
    for record in layout.records:
        if record.dtype is None:
            described[record.key] = metadata.BytesStorageMetadata()
            index = metadata.MetadataIndex(record.key)
        else:
            if record.key not in described:
                described[record.key] = metadata.TensorStorageMetadata(
                    metadata.TensorProperties(dtype=record.dtype),
                    torch.Size(layout.shapes[record.key]),
                    [],
                )
            origin = torch.Size(record.origin)
            chunk = metadata.ChunkStorageMetadata(origin, torch.Size(record.sizes))
            described[record.key].chunks.append(chunk)
            index = metadata.MetadataIndex(record.key, origin)
        places[index] = filesystem._StorageInfo(record.path.name, record.offset, record.length)
    return metadata.Metadata(described, storage_data=places, storage_meta=metadata.StorageMeta())


def _rows(shape: Shape, itemsize: int) -> list[tuple[Shape, Shape]]:
    """(origin, sizes) of the chunks of a parameter: whole rows, at most CHUNK_BYTES per chunk."""
    if not shape:
        return [((), ())]
    total, *tail = shape
    step = max(1, CHUNK_BYTES // max(1, math.prod(tail) * itemsize))
    none = (0,) * len(tail)
    return [
        ((row, *none), (min(step, total - row), *tail)) for row in range(0, max(total, 1), step)
    ]


class _Filler:
    """Assigns records to files, one after another."""

    def __init__(self, max_file_bytes: int) -> None:
        self._limit = max_file_bytes
        self._number = self._end = 0
        self.records: list[Record] = []

    def add(
        self, key: str, dtype: torch.dtype | None, origin: Shape, sizes: Shape, length: int
    ) -> Record:
        """Add the next record, in a new file if the last one has no room for it."""
        if self._end and self._end + length > self._limit:
            self._number, self._end = self._number + 1, 0
        path = Path(f"__0_{self._number}.distcp")
        record = Record(key, dtype, origin, sizes, path, self._end, length)
        self._end += length
        self.records.append(record)
        return record
