"""Reads boxes of a checkpoint's tensors into live memory.

If file and memory have the same layout, data is read straight into place; everything else, and all
GPU memory, goes through a buffer of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megatron_policy.checkpoint.slices import Slice
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.stored import Chunk, Stored
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.converters.rows.regions import Box, Region, runs
from megatron_policy.device import host_buffer, synchronize
from megatron_policy.formats.tensors import flat_bytes

BUFFER_BYTES = 32 << 20


class Filler:
    """Fills memory from files, through its own buffer."""

    def __init__(self, files: RawFiles) -> None:
        self._files = files
        self._buffer: Tensor | None = None

    def fill(self, stored: Stored, places: Iterable[tuple[Slice, Tensor]]) -> None:
        """Copy each slice of the stored tensor to its flat memory, casting. ConversionError if a
        file cannot be read.
        """
        for piece, memory in places:
            for chunk in stored.chunks:
                # The elements that both contain, as indices in the whole tensor.
                along = zip(piece.origin, piece.sizes, chunk.origin, chunk.sizes, strict=True)
                box = tuple((max(a, b), min(a + n, b + m)) for a, n, b, m in along)
                if all(low < high for low, high in box):
                    self._fill(stored.dtype, chunk, piece, memory, box)

    def _fill(
        self, dtype: torch.dtype, chunk: Chunk, piece: Slice, memory: Tensor, box: Box
    ) -> None:
        file = _region(box, chunk.origin, chunk.sizes)
        own = _region(box, piece.origin, piece.sizes)
        if memory.device.type == "cpu" and memory.dtype == dtype:
            found = runs(file, own)
            if all(one.hf + one.length == other.hf for one, other in pairwise(found)):
                size, content = dtype.itemsize, flat_bytes(memory)
                views = [content[r.own * size : (r.own + r.length) * size] for r in found]
                self._files.read(chunk.path, chunk.start + found[0].hf * size, views)
                return
        for part in _parts(box, chunk, BUFFER_BYTES // dtype.itemsize):
            self._through_buffer(dtype, chunk, piece, memory, part)

    def _through_buffer(
        self, dtype: torch.dtype, chunk: Chunk, piece: Slice, memory: Tensor, box: Box
    ) -> None:
        file = _region(box, chunk.origin, chunk.sizes)
        own = _region(box, piece.origin, piece.sizes)
        nbytes = _extent(file) * dtype.itemsize
        if self._buffer is None or self._buffer.numel() < nbytes:
            size = max(nbytes, BUFFER_BYTES)
            self._buffer = host_buffer(torch.empty(size, dtype=torch.uint8, device="meta"))
        buffer = self._buffer[:nbytes]
        start = chunk.start + file.offset * dtype.itemsize
        self._files.read(chunk.path, start, [flat_bytes(buffer)])
        source = buffer.view(dtype).as_strided(file.size, file.stride)
        target = memory.as_strided(own.size, own.stride, memory.storage_offset() + own.offset)
        target.copy_(source, non_blocking=True)
        synchronize()  # the buffer is reused


def _region(box: Box, origin: Shape, sizes: Shape) -> Region:
    """Where the box is in a flat box with that origin and those sizes."""
    stride = tuple(math.prod(sizes[n + 1 :]) for n in range(len(sizes)))
    offset = sum(
        (low - first) * step for (low, _), first, step in zip(box, origin, stride, strict=True)
    )
    return Region(tuple(high - low for low, high in box), stride, offset)


def _extent(region: Region) -> int:
    """Elements from the region's first to its last."""
    steps = zip(region.size, region.stride, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _parts(box: Box, chunk: Chunk, most: int) -> Iterator[Box]:
    """Split the box into parts whose extent in the chunk is at most `most` elements."""
    if _extent(_region(box, chunk.origin, chunk.sizes)) <= most:
        yield box
        return
    dim = next(n for n, (low, high) in enumerate(box) if high - low > 1)
    low, high = box[dim]
    middle = (low + high) // 2
    for ends in ((low, middle), (middle, high)):
        yield from _parts((*box[:dim], ends, *box[dim + 1 :]), chunk, most)
