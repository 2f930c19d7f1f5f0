"""What a rank sends of an HF tensor: segments of its parameter, as strided regions on both sides.

Pure arithmetic over a row's blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.blocks import Row, blocks_of
from megatron_policy.converters.rows.regions import Region, boxes, regions
from megatron_policy.converters.rows.shards import copies_of


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
        if (begin, end) == (0, self.elements) and self.elements == self.hf.elements:
            yield 0, self.hf, self.own
            return
        for box in boxes(self.hf.size, self.first + begin, self.first + end):
            hf = self.hf.cut(box)
            yield place, hf, self.own.cut(box)
            place += hf.elements


@lru_cache(maxsize=4096)
def segments(
    row: Row, architecture: Architecture, part: int, rank: int, size: int
) -> tuple[Segment, ...]:
    """What tensor-parallel rank `rank` of `size` sends of the row's HF tensor `part`, in order.

    Ranks that hold the same send an equal run of it each. All ranks' segments together cover the
    elements of all ranks' blocks, each once.
    """
    held = [b for b in blocks_of(row, architecture, rank, size) if b.part == part]
    whole = [Segment(hf, own, 0, hf.elements) for hf, own in map(regions, held)]
    number, copies = copies_of(row, architecture, size)[rank]
    if copies == 1:
        return tuple(whole)
    share = -(-sum(segment.elements for segment in whole) // copies)
    own = _find_overlaps(whole, number * share, (number + 1) * share)
    return tuple(Segment(s.hf, s.own, low, high - low) for s, low, high, _ in own)


@lru_cache(maxsize=4096)
def largest_share(row: Row, architecture: Architecture, part: int, size: int) -> int:
    """The largest number of elements that any rank sends of the row's HF tensor `part`."""
    return max(
        sum(s.elements for s in segments(row, architecture, part, rank, size))
        for rank in range(size)
    )


def overlaps(
    parts: tuple[Segment, ...], begin: int, end: int
) -> Iterator[tuple[int, Region, Region]]:
    """Elements `begin` to `end` of consecutive segments: (place in the range, HF, parameter)."""
    for segment, low, high, first in _find_overlaps(parts, begin, end):
        for place, hf, own in segment.pieces(low, high):
            yield first + place, hf, own


def _find_overlaps(
    parts: Iterable[Segment], begin: int, end: int
) -> Iterator[tuple[Segment, int, int, int]]:
    """The segments with elements `begin` to `end` of them all: each with its own such range, and
    the place of that in the whole range.
    """
    at = 0
    for segment in parts:
        low, high = max(begin - at, 0), min(end - at, segment.elements)
        if low < high:
            yield segment, low, high, at + low - begin
        at += segment.elements
