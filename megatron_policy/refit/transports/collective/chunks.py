"""Packs tensors into the chunks of a stream and unpacks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatron_policy.coordination.process_group import PendingCollective
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.transports.collective.stream_layout import Stream, StreamSlot


class Writer:
    """Assembles a stream in the memory of one chunk and, for tensors that span chunks, in one more
    buffer of the tensor's size. A full chunk is sent, and waited for when its memory is needed.
    """

    def __init__(
        self,
        stream: Stream,
        size: int,
        device: torch.device,
        send: Callable[[Tensor], PendingCollective],
    ) -> None:
        """`send` starts sending a chunk of at most `size` bytes."""
        slots = stream.slots
        ends = [*(slot.offset for slot in slots[1:]), stream.nbytes]
        self._slots = {slot.name: (slot, end) for slot, end in zip(slots, ends, strict=True)}
        self._size, self._total, self._send = size, stream.nbytes, send
        self._chunk = Buffer.on(device, min(size, stream.nbytes))
        aside = (slot.end - slot.offset for slot in slots if not _fits(slot, size))
        self._aside = Buffer.on(device, max(aside, default=0))
        self._first = 0  # where in the stream the chunk begins
        self._pending: PendingCollective | None = None

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
        """`views` are the views of `memory` by name that `views_of` makes."""
        self._memory, self._views = memory, views
        self._slots, self._next = stream.slots, 0

    def memory_for(self, first: int, end: int) -> Tensor:
        """See `Reader`."""
        return self._memory[first:end]

    def complete(self, first: int, end: int) -> list[tuple[str, Tensor]]:
        """See `Reader`."""
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
        """See `Reader`."""
        return self._chunk[: end - first]

    def complete(self, first: int, end: int) -> list[tuple[str, Tensor]]:
        """See `Reader`."""
        done: list[tuple[str, Tensor]] = []
        while self._next < len(self._slots) and _begun(self._slots[self._next], end):
            slot = self._slots[self._next]
            if _fits(slot, self._size):
                done.append((slot.name, _view_of(slot, self._chunk, first)))
            elif (tensor := self._pieced(slot, first, end)) is not None:
                done.append((slot.name, tensor))
            else:
                break
            self._next += 1
        return done

    def _pieced(self, slot: StreamSlot, first: int, end: int) -> Tensor | None:
        if self._aside is None:
            nbytes = slot.end - slot.offset
            self._aside = torch.empty(nbytes, dtype=torch.uint8, device=self._chunk.device)
        low, high = max(slot.offset, first), min(slot.end, end)
        part = self._chunk[low - first : high - first]
        self._aside[low - slot.offset : high - slot.offset].copy_(part)
        if slot.end > end:
            return None
        whole, self._aside = self._aside, None
        return _view_of(slot, whole, slot.offset)


def views_of(stream: Stream, memory: Tensor) -> dict[str, Tensor]:
    """The tensors of a stream stored in `memory`."""
    return {slot.name: _view_of(slot, memory) for slot in stream.slots}


def _view_of(slot: StreamSlot, memory: Tensor, first: int = 0) -> Tensor:
    """The tensor in `memory`, which begins at byte `first` of the stream."""
    if slot.end == slot.offset:  # its offset may be misaligned for its dtype
        return torch.empty(slot.shape, dtype=slot.dtype, device=memory.device)
    flat = memory[slot.offset - first : slot.end - first]
    return flat.view(slot.dtype).view(slot.shape)


def _fits(slot: StreamSlot, size: int) -> bool:
    """Whether the tensor lies in one chunk, aligned for its dtype."""
    first, within = divmod(slot.offset, size)
    return slot.end <= (first + 1) * size and within % slot.dtype.itemsize == 0


def _begun(slot: StreamSlot, end: int) -> bool:
    """Whether any part of the tensor, or an empty tensor, lies before byte `end` of the stream."""
    return slot.offset < end or slot.end <= end
