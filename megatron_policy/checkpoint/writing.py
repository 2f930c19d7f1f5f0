"""Stages what is written in host memory, writes a rank's file of a sharded checkpoint record by
record, and merges all ranks' files into one checkpoint.

On the CPU a blocking save writes straight from the policy's memory.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from megatron_policy.checkpoint.local_shards import WriteItem
from megatron_policy.checkpoint.manifest import ByteRange
from megatron_policy.converters.files.publishing import write_file
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dist_records import framing
from megatron_policy.converters.formats.dist_writing import DistLayout, Record
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.device import (
    is_accelerated,
    make_side_stream,
    on_side_stream,
    queued,
    spare_cores,
)
from megatron_policy.dtypes import dtype_named, name_dtype
from megatron_policy.errors import CheckpointError
from megatron_policy.formats.digests import Digest
from megatron_policy.formats.tensors import flat_bytes
from megatron_policy.memory.pinned_pool import PinnedMemoryPool, PoolSlice

WINDOW_BYTES = 256 << 20
"""Device memory copied to the host at a time in a blocking save."""

Ready = tuple[WriteItem, list[memoryview]]
"""A write item and its bytes, in host memory."""


class Staging:
    """Copies of all items to pool memory, in background threads; iterating waits for all of them.

    The copies are of the items at construction: these must neither change nor move before `wait`
    has returned.
    """

    def __init__(self, items: Sequence[WriteItem], pool: PinnedMemoryPool) -> None:
        """MemoryError, or what the pool raises, if there is not enough memory for all of them."""
        self._items = items
        self._regions = [pool.take(item.tensor.nbytes) for item in items]
        threads = 1 if is_accelerated() else spare_cores()
        # Dealt round-robin, largest first: about as many bytes to each thread.
        pairs = [(i.tensor.view(torch.uint8), r) for i, r in zip(items, self._regions, strict=True)]
        order = sorted(pairs, key=lambda pair: -pair[0].nbytes)
        point, stream = queued(), make_side_stream()
        workers = ThreadPoolExecutor(threads, "checkpoint-staging")
        # Submit everything here: later the interpreter may be ending and accept no more work.
        self._copies: list[Future[None]] = []
        try:
            for n in range(threads):
                self._copies.append(workers.submit(_copy, order[n::threads], point, stream))
        except BaseException:
            self.wait()
            raise
        finally:
            workers.shutdown(wait=False)

    def wait(self) -> None:
        """Return when the items are no longer being read, whether or not all were copied."""
        wait(self._copies)

    def __iter__(self) -> Iterator[Ready]:
        """Iterate over the copies; if one failed, its error is raised before the first."""
        for copy in self._copies:
            copy.result()
        for item, region in zip(self._items, self._regions, strict=True):
            yield item, [flat_bytes(piece) for piece in region]


def stage_in_turn(
    items: Sequence[WriteItem], host_memory: Callable[[], PinnedMemoryPool]
) -> Iterator[Ready]:
    """The items in host memory, for a blocking save: their own memory, which must not change while
    it is in use, or copies of a few at a time; each must be used before the next is requested.
    """
    if all(item.tensor.device.type == "cpu" for item in items):
        for item in items:
            yield item, [flat_bytes(item.tensor)]
        return
    windows: list[list[WriteItem]] = []
    held = 0
    for item in items:
        if not windows or held + item.tensor.nbytes > WINDOW_BYTES:
            windows.append([])
            held = 0
        windows[-1].append(item)
        held += item.tensor.nbytes
    for window in windows:
        pool = host_memory()
        pool.reset()
        yield from Staging(window, pool)


def _copy(pairs: Sequence[tuple[Tensor, PoolSlice]], point: Any, stream: Any) -> None:
    with on_side_stream(point, stream):
        for source, region in pairs:
            start = 0
            for piece in region:
                piece.copy_(source[start : start + piece.numel()], non_blocking=True)
                start += piece.numel()


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
