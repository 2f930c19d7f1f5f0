"""Goes through tensors block by block in one buffer; knows nothing of what is done with a block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_policy.errors import ConfigError
from megatron_policy.formats.tensors import Info

PLAIN_BYTES = 4 * 2**20
"""Of a block whose bytes need no rearranging: they stay in the processor's cache that way."""
MOST_BYTES = 128 * 2**20
"""Of everything in memory for a block that needs it: enough for a matrix of any expert."""
LEAST_BYTES = 2**20
"""Of the buffer, below which time goes by blocks and not by bytes."""


@dataclass(frozen=True)
class Blocks:
    """How a tensor is cut: `elements` at a time, each with bytes for copies and for scratch."""

    info: Info
    elements: int
    copies: tuple[torch.dtype, ...]
    """What is held of a block at the same time."""
    scratch: int
    """Bytes for each element."""

    @property
    def nbytes(self) -> int:
        """Of buffer needed."""
        return sum(map(self.room, self.copies)) + self.elements * self.scratch

    def room(self, dtype: torch.dtype) -> int:
        """Bytes for a copy of a block, up to where the next one may start."""
        return -(-self.elements * dtype.itemsize // 8) * 8


def cut(info: Info, copies: tuple[torch.dtype, ...], scratch: int, max_memory: int) -> Blocks:
    """Blocks of a tensor within `max_memory` bytes, of whole rows where these are small enough."""
    each = sum(dtype.itemsize for dtype in copies) + scratch
    # The rest is for what Python and torch hold besides.
    most = min(max_memory, MOST_BYTES) * 3 // 4 // each
    if not scratch:
        most = min(most, PLAIN_BYTES // copies[0].itemsize)
    # Parts of rows are many small pieces where a tensor is transposed on the way.
    units = (math.prod(info.shape[dim:]) for dim in range(1, len(info.shape)))
    whole = next((unit for unit in units if 0 < unit <= most), 1)
    elements = most // whole * whole
    return Blocks(info, min(elements, info.elements), copies, scratch)


class Buffer:
    """The one piece of memory for blocks; the system gives what of it is used."""

    def __init__(self, max_memory: int) -> None:
        self._bytes = torch.empty(min(max_memory, MOST_BYTES), dtype=torch.uint8)

    def blocks(self, cut: Blocks) -> Iterator[tuple[int, tuple[Tensor, ...], Tensor]]:
        """(first element, flat tensors for the copies, scratch bytes) of each block."""
        total = cut.info.elements
        for first in range(0, total, max(1, cut.elements)):
            count, at = min(cut.elements, total - first), 0
            held = []
            for dtype in cut.copies:
                end = at + count * dtype.itemsize
                held.append(self._bytes[at:end].view(dtype))
                at += cut.room(dtype)
            yield first, tuple(held), self._bytes[at : at + count * cut.scratch]


def check_memory(max_memory: int) -> int:
    """The number; ConfigError when it is too small to work with."""
    if max_memory < LEAST_BYTES:
        raise ConfigError(f"max_memory is {max_memory} bytes; it must be at least {LEAST_BYTES}")
    return max_memory
