"""Goes through tensors block by block in one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_policy.errors import ConfigError
from megatron_policy.formats.tensors import Info

PLAIN_BYTES = 4 * 2**20
"""Size of a block that needs no rearranging: small enough to stay in the processor's cache."""
MOST_BYTES = 128 * 2**20
"""Limit for everything in memory for a block that needs rearranging: a matrix of any
expert fits.
"""
LEAST_BYTES = 2**20
"""Smallest buffer: below it, the cost per block outweighs the cost per byte."""


@dataclass(frozen=True)
class Blocks:
    """How a tensor is cut: `elements` at a time, with bytes for its copies and for scratch."""

    info: Info
    elements: int
    copies: tuple[torch.dtype, ...]
    """Dtypes in which a block is held at the same time."""
    scratch: int
    """Bytes per element."""

    @property
    def nbytes(self) -> int:
        """Buffer size needed, in bytes."""
        return sum(map(self.padded_bytes, self.copies)) + self.elements * self.scratch

    def padded_bytes(self, dtype: torch.dtype) -> int:
        """Bytes for a copy of a block, up to where the next one can start."""
        return -(-self.elements * dtype.itemsize // 8) * 8


def cut(info: Info, copies: tuple[torch.dtype, ...], scratch: int, max_memory: int) -> Blocks:
    """Blocks of a tensor within `max_memory` bytes, of whole rows if these are small enough."""
    each = sum(dtype.itemsize for dtype in copies) + scratch
    # The rest is for the other memory of Python and torch.
    most = min(max_memory, MOST_BYTES) * 3 // 4 // each
    if not scratch:
        most = min(most, PLAIN_BYTES // copies[0].itemsize)
    # If a tensor is transposed on the way, parts of rows become many small pieces.
    units = (math.prod(info.shape[dim:]) for dim in range(1, len(info.shape)))
    whole = next((unit for unit in units if 0 < unit <= most), 1)
    elements = most // whole * whole
    return Blocks(info, min(elements, info.elements), copies, scratch)


class BlockBuffer:
    """The one buffer for all blocks; the system only allocates the pages that are used."""

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
                at += cut.padded_bytes(dtype)
            yield first, tuple(held), self._bytes[at : at + count * cut.scratch]


def check_memory(max_memory: int) -> int:
    """Return the number; ConfigError if it is too small to work with."""
    if max_memory < LEAST_BYTES:
        raise ConfigError(f"max_memory is {max_memory} bytes; it must be at least {LEAST_BYTES}")
    return max_memory
