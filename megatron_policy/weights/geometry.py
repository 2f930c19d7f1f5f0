"""Maps a rank's elements of an HF tensor to its parameter, as strided boxes on both sides.

Pure arithmetic over a row's blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.blocks import Block, Row, Shape, blocks_of
from megatron_policy.converters.rows.runs import boxes


class Region(NamedTuple):
    """A box of a flat tensor, in elements: the arguments of `as_strided`."""

    size: Shape
    stride: Shape
    offset: int

    def cut(self, box: tuple[tuple[int, int], ...]) -> Region:
        """The part of it in `box`, given as (first, end) per dimension."""
        return Region(
            tuple(high - low for low, high in box),
            self.stride,
            self.offset + sum(low * step for (low, _), step in zip(box, self.stride, strict=True)),
        )


class Run(NamedTuple):
    """Elements that are contiguous on both sides: the first index on each, and how many."""

    hf: int
    own: int
    length: int


def runs(hf: Region, own: Region) -> tuple[Run, ...]:
    """The elements of two boxes of one size, in the fewest runs that are contiguous in both."""
    inner, length = len(hf.size), 1
    while inner and (
        hf.size[inner - 1] == 1 or hf.stride[inner - 1] == own.stride[inner - 1] == length
    ):
        inner -= 1
        length *= hf.size[inner]
    outer = [
        [(index * a, index * b) for index in range(size)]
        for size, a, b in zip(hf.size[:inner], hf.stride, own.stride, strict=False)
    ]
    return tuple(
        Run(hf.offset + sum(a for a, _ in at), own.offset + sum(b for _, b in at), length)
        for at in product(*outer)
    )


class Segment(NamedTuple):
    """A run of a block's elements, in the row-major order of the box that both sides share."""

    hf: Region
    """In the flat HF tensor."""
    own: Region
    """In the rank's flat parameter."""
    first: int
    elements: int

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, Region, Region]]:
        """Elements `begin` to `end` of the run as boxes: (place in the range, HF, parameter)."""
        place = 0
        if (begin, end) == (0, self.elements) and self.elements == math.prod(self.hf.size):
            yield 0, self.hf, self.own
            return
        for box in boxes(self.hf.size, self.first + begin, self.first + end):
            hf = self.hf.cut(box)
            yield place, hf, self.own.cut(box)
            place += math.prod(hf.size)


@lru_cache(maxsize=4096)
def segments(
    row: Row, architecture: Architecture, part: int, slot: int, slots: int
) -> tuple[Segment, ...]:
    """What tensor-parallel rank `slot` of `slots` sends of the row's HF tensor `part`, in order.

    Of a parameter that every rank holds whole, each rank sends an equal run. All ranks' segments
    together cover the elements of all ranks' blocks, each once.
    """
    blocks = [b for b in blocks_of(row, architecture, slot, slots) if b.part == part]
    hf_shape = row.hf_shapes(architecture)[part]
    own_shape = row.local_shape(architecture, slots)
    whole = [_segment(block, hf_shape, own_shape) for block in blocks]
    if row.shard_dim is not None or slots == 1:
        return tuple(whole)
    share = -(-sum(segment.elements for segment in whole) // slots)
    return tuple(_cut(whole, slot * share, (slot + 1) * share))


@lru_cache(maxsize=4096)
def largest_share(row: Row, architecture: Architecture, part: int, slots: int) -> int:
    """The largest number of elements that any rank sends of the row's HF tensor `part`."""
    return max(
        sum(s.elements for s in segments(row, architecture, part, slot, slots))
        for slot in range(slots)
    )


def overlaps(
    parts: tuple[Segment, ...], begin: int, end: int
) -> Iterator[tuple[int, Region, Region]]:
    """Elements `begin` to `end` of consecutive segments: (place in the range, HF, parameter)."""
    at = 0
    for segment in parts:
        low, high = max(begin - at, 0), min(end - at, segment.elements)
        if low < high:
            for place, hf, own in segment.pieces(low, high):
                yield at + low - begin + place, hf, own
        at += segment.elements


def _segment(block: Block, hf_shape: Shape, own_shape: Shape) -> Segment:
    hf = torch.empty(hf_shape, device="meta").view(block.hf_view)[block.hf_index]
    own = torch.empty(own_shape, device="meta").view(block.shard_view)[block.shard_index]
    own = own.mT if block.transposed else own
    assert hf.shape == own.shape, block
    return Segment(_region(hf), _region(own), 0, hf.numel())


def _region(view: torch.Tensor) -> Region:
    return Region(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))


def _cut(whole: list[Segment], begin: int, end: int) -> Iterator[Segment]:
    at = 0
    for segment in whole:
        low, high = max(begin - at, 0), min(end - at, segment.elements)
        if low < high:
            yield Segment(segment.hf, segment.own, low, high - low)
        at += segment.elements
