"""Writes a rank's file of a sharded checkpoint record by record, and merges all ranks' files into
one checkpoint.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

import torch

from megatron_policy.checkpoint.manifest import ByteRange
from megatron_policy.checkpoint.staging import Ready
from megatron_policy.converters.files.publishing import write_file
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dist_records import framing
from megatron_policy.converters.formats.dist_writing import DistLayout, Record
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.dtypes import dtype_named, name_dtype
from megatron_policy.errors import CheckpointError
from megatron_policy.formats.digests import Digest

_NOTE = ".rank-{}.json"

In = TypeVar("In")
Out = TypeVar("Out")


class Written(NamedTuple):
    """A record in a rank's file; `dtype` is empty for an object."""

    key: str
    dtype: str
    shape: Shape
    origin: Shape
    sizes: Shape
    offset: int
    length: int
    digest: str


def write_records(
    directory: Path, rank: int, ready: Iterable[Ready], objects: Mapping[str, bytes]
) -> None:
    """Write this rank's file, which is on disk when this returns, and a list of its records next
    to it. ExportError, naming the file, on failure.
    """
    path = directory / f"__{rank}_0.distcp"
    done: list[Written] = []
    end = 0

    def digest_all(parts: list[memoryview]) -> str:
        digest = Digest()
        for part in parts:
            digest.update(part)
        return digest.text()

    with RawFiles(writable=True) as files, BackgroundWorker(digest_all) as digests:
        for record, parts in _records(ready, objects):
            digests.give(parts)  # while the bytes are written
            files.write(path, end, parts)
            length = sum(part.nbytes for part in parts)
            done.append(record._replace(offset=end, length=length, digest=digests.take()))
            end += length
        if done:
            files.sync([path])
    write_file(directory / _NOTE.format(rank), json.dumps(done).encode(), wait=False)


def _records(
    ready: Iterable[Ready], objects: Mapping[str, bytes]
) -> Iterator[tuple[Written, list[memoryview]]]:
    """Each record, without its offset yet, and its bytes."""
    for item, views in ready:
        prefix, suffix = framing(item.tensor.dtype, item.sizes)
        shapes = (item.shape, item.origin, item.sizes)
        record = Written(item.key, name_dtype(item.tensor.dtype), *shapes, 0, 0, "")
        yield record, [memoryview(prefix), *views, memoryview(suffix)]
    for key, content in objects.items():
        yield Written(key, "", (), (), (), 0, 0, ""), [memoryview(content)]


@dataclass(frozen=True)
class Merged:
    """All ranks' records, as the checkpoint's metadata and its manifest list them."""

    layout: DistLayout
    tensors: Mapping[str, tuple[torch.dtype, Shape]]
    records: Mapping[str, tuple[ByteRange, ...]]


def merge(directory: Path, ranks: int) -> Merged:
    """The records in all ranks' lists; the lists are deleted.

    CheckpointError if a rank has left no list: the directory is not on shared storage.
    """
    records: list[Record] = []
    tensors: dict[str, tuple[torch.dtype, Shape]] = {}
    sealed: dict[str, tuple[ByteRange, ...]] = {}
    for rank in range(ranks):
        file = Path(f"__{rank}_0.distcp")
        path = directory / _NOTE.format(rank)
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise CheckpointError(
                f"rank {rank} has written its part, but there is no {path} here: every node has to "
                "reach the checkpoint's directory under the same path"
            ) from error
        path.unlink()
        done = [
            Written(key, dtype, tuple(shape), tuple(origin), tuple(sizes), offset, length, digest)
            for key, dtype, shape, origin, sizes, offset, length, digest in content
        ]
        for each in done:
            dtype = dtype_named(each.dtype) if each.dtype else None
            if dtype is not None:
                tensors[each.key] = (dtype, each.shape)
            where = (file, each.offset, each.length)
            records.append(Record(each.key, dtype, each.origin, each.sizes, *where))
        if done:
            sealed[file.name] = tuple(ByteRange(r.offset, r.length, r.digest) for r in done)
    shapes = {key: shape for key, (_, shape) in tensors.items()}
    return Merged(DistLayout(tuple(records), shapes, ()), tensors, sealed)


class BackgroundWorker(Generic[In, Out]):
    """A background thread that works on one item at a time: `give` it one, then `take` the result.

    A background save may outlive the script. The executors of `concurrent.futures` accept no work
    while the interpreter waits for its last threads. No thread can be started then either; the work
    is then done in place.
    """

    def __init__(self, work: Callable[[In], Out]) -> None:
        """`work` must not raise."""
        self._given: SimpleQueue[In | None] = SimpleQueue()
        self._done: SimpleQueue[Out] = SimpleQueue()
        self._work = work
        self._thread = threading.Thread(target=self._run, name="background-worker", daemon=True)
        self._works = start_thread(self._thread)

    def give(self, thing: In) -> None:
        """Start work on `thing`."""
        if self._works:
            self._given.put(thing)
        else:
            self._done.put(self._work(thing))

    def take(self) -> Out:
        """The result of the oldest thing given whose result was not taken yet; waits for it."""
        return self._done.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._works:
            self._given.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (thing := self._given.get()) is not None:
            self._done.put(self._work(thing))
