"""How tensors are laid out in streams of bytes, cut into chunks of equal size.

Pure: every sender and every receiver of a refit computes the same layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from megatron_policy.dtypes import dtype_named
from megatron_policy.errors import RefitError

ALIGNMENT = 16  # bytes; a multiple of every dtype's size


class Described(Protocol):
    """What a stream needs to know about a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


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
    def of(cls, tensors: Sequence[Described]) -> Stream:
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

    def encoded(self) -> bytes:
        """The layout as JSON: for each stream, its tensors in order."""
        content = [
            [[slot.name, list(slot.shape), _word(slot.dtype)] for slot in stream.slots]
            for stream in self.streams
        ]
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, content: bytes) -> StreamLayout:
        """The inverse of `encoded`; RefitError for anything else."""
        try:
            return cls(tuple(_stream(said) for said in json.loads(content)))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RefitError(
                f"the trainer's list of tensors cannot be read: {error}; "
                "use the same version of megatron-policy on both sides"
            ) from error


def _stream(said: list[tuple[str, list[int], str]]) -> Stream:
    return Stream.of(
        [
            StreamSlot(name, tuple(map(int, shape)), dtype_named(dtype), 0)
            for name, shape, dtype in said
        ]
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
