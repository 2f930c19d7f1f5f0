"""Memory that whole tensors are assembled in."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes. Tensors start at multiples of it in packed buffers, as the host's receivers expect."""


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up."""
    return -(-nbytes // alignment) * alignment


class Buffer:
    """A flat block of memory, viewable as any dtype."""

    def __init__(self, memory: Tensor) -> None:
        assert memory.dtype == torch.uint8 and memory.dim() == 1, memory.shape
        self.memory, self.address, self.nbytes = memory, memory.data_ptr(), memory.numel()
        self._typed: dict[torch.dtype, Tensor] = {torch.uint8: memory}

    @classmethod
    def on(cls, device: torch.device, nbytes: int) -> Buffer:
        """A new, uninitialised buffer whose size is a multiple of every dtype's."""
        return cls(torch.empty(align(nbytes), dtype=torch.uint8, device=device))

    def typed(self, dtype: torch.dtype) -> Tensor:
        """The whole buffer as flat elements of `dtype`; always the same tensor."""
        if dtype not in self._typed:
            whole = self.memory.numel() // dtype.itemsize * dtype.itemsize
            self._typed[dtype] = self.memory[:whole].view(dtype)
        return self._typed[dtype]

    def forget(self) -> None:
        """Release the memory, even if the buffer itself is still referenced."""
        self.memory, self.nbytes = self.memory.new_empty(0), 0
        self._typed.clear()


class BufferSlice(NamedTuple):
    """Where one tensor's elements belong: row-major, starting at byte `offset` of `buffer`."""

    buffer: Buffer
    offset: int

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of it; `offset` must be a multiple of the element size."""
        first, over = divmod(self.offset, dtype.itemsize)
        assert not over, (self.offset, dtype)
        return self.buffer.typed(dtype)[first : first + math.prod(shape)].view(shape)

    def elements(self, dtype: torch.dtype) -> tuple[Tensor, int]:
        """The buffer in `dtype`, and where in its storage the slice begins."""
        typed = self.buffer.typed(dtype)
        return typed, int(typed.storage_offset()) + self.offset // dtype.itemsize

    def bytes(self, nbytes: int) -> Tensor:
        """Its bytes, flat."""
        return self.buffer.memory[self.offset : self.offset + nbytes]
