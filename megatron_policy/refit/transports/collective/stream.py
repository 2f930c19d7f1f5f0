"""How tensors are laid out in streams of bytes, cut into chunks of equal size, and how they are
packed into chunks and unpacked.

Every sender and every receiver of a refit computes the same layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_policy.dtypes import dtype_named, name_dtype
from megatron_policy.errors import RefitError
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.plan import RefitTensor
from megatron_policy.refit.transports.movers.mover import Writing

ALIGNMENT = 16  # bytes; a multiple of every dtype's size


@dataclass(frozen=True)
class StreamSlot:
    """One tensor's position: `offset` bytes from the start of its stream."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @cached_property
    def end(self) -> int:
        """The byte after its last byte."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stream:
    """What one sender sends: tensors one after another, at offsets aligned to `ALIGNMENT`."""

    slots: tuple[StreamSlot, ...]

    @classmethod
    def of(cls, tensors: Sequence[RefitTensor]) -> Stream:
        """The stream of these tensors in this order."""
        slots: list[StreamSlot] = []
        end = 0
        for tensor in tensors:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            slots.append(StreamSlot(tensor.name, tensor.shape, tensor.dtype, offset))
            end = slots[-1].end
        return cls(tuple(slots))

    @property
    def nbytes(self) -> int:
        """Bytes from the start of the first tensor to the end of the last."""
        return self.slots[-1].end if self.slots else 0

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        """(first, end) of each chunk: `size` bytes; the last may have fewer."""
        for first in range(0, self.nbytes, size):
            yield first, min(first + size, self.nbytes)


@dataclass(frozen=True)
class StreamLayout:
    """The streams of all senders of a refit."""

    streams: tuple[Stream, ...]

    def encode(self) -> bytes:
        """The layout as JSON: for each stream, its tensors in order."""
        content = [
            [[slot.name, list(slot.shape), name_dtype(slot.dtype)] for slot in stream.slots]
            for stream in self.streams
        ]
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> StreamLayout:
        """The inverse of `encode`; RefitError for anything else."""
        try:
            streams = [
                [
                    RefitTensor(name, tuple(map(int, shape)), dtype_named(dtype))
                    for name, shape, dtype in tensors
                ]
                for tensors in json.loads(content)
            ]
            return cls(tuple(map(Stream.of, streams)))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RefitError(
                f"the trainer's list of tensors cannot be read: {error}; "
                "use the same version of megatron-policy on both sides"
            ) from error


class Writer:
    """Assembles a stream in the memory of one chunk and, for tensors that span chunks, in one more
    buffer of the tensor's size. A full chunk is sent, and waited for when its memory is needed.
    """

    def __init__(
        self,
        stream: Stream,
        size: int,
        device: torch.device,
        send: Callable[[Tensor], Writing],
        memory: Tensor | None = None,
    ) -> None:
        """`send` starts sending a chunk of at most `size` bytes, of `memory` if that is given."""
        slots = stream.slots
        ends = [*(slot.offset for slot in slots[1:]), stream.nbytes]
        self._slots = {slot.name: (slot, end) for slot, end in zip(slots, ends, strict=True)}
        self._size, self._total, self._send = size, stream.nbytes, send
        most = min(size, stream.nbytes)
        self._chunk = Buffer.on(device, most) if memory is None else Buffer(memory)
        aside = (slot.end - slot.offset for slot in slots if not _fits(slot, size))
        self._aside = Buffer.on(device, max(aside, default=0))
        self._first = 0  # where in the stream the chunk begins
        self._pending: Writing | None = None

    def place(self, name: str) -> BufferSlice:
        """Where to write that tensor's elements; tensors come in the stream's order."""
        slot, _ = self._slots[name]
        if not _fits(slot, self._size):
            return BufferSlice(self._aside, 0)
        self.settle()
        return BufferSlice(self._chunk, slot.offset - self._first)

    def filled(self, name: str, target: BufferSlice) -> None:
        """All elements of that tensor have been written."""
        slot, upto = self._slots[name]
        at = slot.offset
        while target.buffer is self._aside and at < slot.end:
            self.settle()
            end = min(slot.end, self._first + self._size)
            part = self._aside.memory[at - slot.offset : end - slot.offset]
            self._chunk.memory[at - self._first : end - self._first].copy_(part)
            self._send_full(end)
            at = end
        self._send_full(upto)

    def settle(self) -> None:
        """Wait until the chunk's memory can be reused."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _send_full(self, upto: int) -> None:
        """Send the chunk if it is complete: the stream is written up to byte `upto`."""
        while self._first < (end := min(self._first + self._size, self._total)) <= upto:
            self.settle()
            self._pending = self._send(self._chunk.memory[: end - self._first])
            self._first = end


class Reader(Protocol):
    """Unpacks the tensors of a stream from its chunks, which arrive in order."""

    def memory_for(self, first: int, end: int) -> Tensor:
        """Where to receive the chunk with these bytes of the stream."""

    def complete(self, first: int, end: int) -> list[tuple[str, Tensor]]:
        """The tensors that this chunk, now received, completes."""


class WholeReader:
    """Receives a stream into memory that holds all of it; its tensors are views of that memory."""

    def __init__(self, stream: Stream, memory: Tensor, views: Mapping[str, Tensor]) -> None:
        """`views` are the views of `memory` by name that `make_views` makes."""
        self._memory, self._views = memory, views
        self._slots, self._next = stream.slots, 0

    def memory_for(self, first: int, end: int) -> Tensor:
        return self._memory[first:end]

    def complete(self, first: int, end: int) -> list[tuple[str, Tensor]]:
        begin = self._next
        while self._next < len(self._slots) and self._slots[self._next].end <= end:
            self._next += 1
        return [(slot.name, self._views[slot.name]) for slot in self._slots[begin : self._next]]


class ChunkReader:
    """Receives each chunk into the same memory. Tensors are views of it, or have their own memory
    if they span chunks. What `complete` returns is valid until the next chunk is received.
    """

    def __init__(self, stream: Stream, size: int, device: torch.device) -> None:
        self._slots, self._size, self._next = stream.slots, size, 0
        self._chunk = Buffer.on(device, min(size, stream.nbytes)).memory
        self._aside: Tensor | None = None

    def memory_for(self, first: int, end: int) -> Tensor:
        return self._chunk[: end - first]

    def complete(self, first: int, end: int) -> list[tuple[str, Tensor]]:
        done: list[tuple[str, Tensor]] = []
        while self._next < len(self._slots):
            slot = self._slots[self._next]
            if slot.offset >= end and slot.end > end:  # nothing of it has come
                break
            if _fits(slot, self._size):
                done.append((slot.name, _make_view(slot, self._chunk, first)))
            elif (tensor := self._piece_together(slot, first, end)) is not None:
                done.append((slot.name, tensor))
            else:
                break
            self._next += 1
        return done

    def _piece_together(self, slot: StreamSlot, first: int, end: int) -> Tensor | None:
        if self._aside is None:
            nbytes = slot.end - slot.offset
            self._aside = torch.empty(nbytes, dtype=torch.uint8, device=self._chunk.device)
        low, high = max(slot.offset, first), min(slot.end, end)
        part = self._chunk[low - first : high - first]
        self._aside[low - slot.offset : high - slot.offset].copy_(part)
        if slot.end > end:
            return None
        whole, self._aside = self._aside, None
        return _make_view(slot, whole, slot.offset)


def make_views(stream: Stream, memory: Tensor) -> dict[str, Tensor]:
    """The tensors of a stream stored in `memory`."""
    return {slot.name: _make_view(slot, memory) for slot in stream.slots}


def _make_view(slot: StreamSlot, memory: Tensor, first: int = 0) -> Tensor:
    """The tensor in `memory`, which begins at byte `first` of the stream."""
    if slot.end == slot.offset:  # its offset may be misaligned for its dtype
        return torch.empty(slot.shape, dtype=slot.dtype, device=memory.device)
    flat = memory[slot.offset - first : slot.end - first]
    return flat.view(slot.dtype).view(slot.shape)


def _fits(slot: StreamSlot, size: int) -> bool:
    """Whether the tensor lies in one chunk, aligned for its dtype."""
    first, within = divmod(slot.offset, size)
    return slot.end <= (first + 1) * size and within % slot.dtype.itemsize == 0
