"""A tensor stored in chunks in files: maps ranges of its elements to bytes of files.

Opens no files.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_policy.converters.rows.blocks import Block, Shape
from megatron_policy.converters.rows.runs import Correspondence

MAX_CORNERS = 10_000_000
"""Limit for chunks that are cut irregularly: it bounds the time to check whether they fill a
tensor.
"""

if TYPE_CHECKING:
    from torch import dtype


class Chunk(NamedTuple):
    """A box of a tensor, stored row by row in a file from byte `start` on."""

    path: Path
    start: int
    origin: Shape
    sizes: Shape

    def lower(self, rows: int) -> Chunk:
        """The same so many rows below."""
        if not rows:
            return self
        return self._replace(origin=(self.origin[0] + rows, *self.origin[1:]))


class Transfer(NamedTuple):
    """Contiguous bytes of a file, and the `spans`, (first, end), of a range that they fill."""

    path: Path
    offset: int
    spans: list[tuple[int, int]]


class Stored:
    """A tensor of that shape and dtype whose `chunks` tile it, or tile more rows than it has."""

    def __init__(self, shape: Shape, dtype: dtype, chunks: Sequence[Chunk]) -> None:
        self.shape, self.dtype = shape, dtype
        self.chunks = tuple(sorted(chunks, key=lambda chunk: chunk.origin))
        self._in_rows = all(chunk.sizes[1:] == shape[1:] for chunk in self.chunks)
        self._row = math.prod(shape[1:])

    @classmethod
    def in_one_piece(cls, shape: Shape, dtype: dtype, path: Path, start: int) -> Stored:
        """A tensor whose bytes are contiguous in a file from `start` on."""
        return cls(shape, dtype, [Chunk(path, start, (0,) * len(shape), shape)])

    def transfers(self, first: int, count: int) -> Iterator[Transfer]:
        """Where elements `first` to `first + count` lie, as `spans` of a flat buffer for them."""
        if not self._in_rows:
            yield from self._scattered(first, first + count)
            return
        item, last = self.dtype.itemsize, first + count
        at = max(0, bisect_right(self._starts, first) - 1)
        while first < last:
            chunk, start = self.chunks[at], self._starts[at]
            end = min(last, start + chunk.sizes[0] * self._row if chunk.sizes else start + 1)
            if first < end:
                done = count - (last - first)
                span = (done * item, (done + end - first) * item)
                yield Transfer(chunk.path, chunk.start + (first - start) * item, [span])
                first = end
            at += 1

    def extents(self) -> Iterator[tuple[Path, int, int]]:
        """(path, first byte, the one after the last) of the tensor's own bytes."""
        for move in self.transfers(0, math.prod(self.shape)):
            yield move.path, move.offset, move.offset + sum(b - a for a, b in move.spans)

    @cached_property
    def _starts(self) -> list[int]:
        """The first element of each chunk, for chunks of whole rows."""
        return [chunk.origin[0] * self._row if chunk.origin else 0 for chunk in self.chunks]

    @cached_property
    def _boxes(self) -> list[tuple[Chunk, Correspondence]]:
        boxes = []
        for chunk in self.chunks:
            index = tuple(
                slice(at, at + n) for at, n in zip(chunk.origin, chunk.sizes, strict=True)
            )
            # Rows that the files have beyond the tensor's shape are never read.
            view = (max(self.shape[0], chunk.origin[0] + chunk.sizes[0]), *self.shape[1:])
            block = Block(0, view, index, chunk.sizes, (slice(None),))
            boxes.append((chunk, Correspondence.of(block)))
        return boxes

    def _scattered(self, first: int, last: int) -> Iterator[Transfer]:
        """The same for chunks of any shape, chunk by chunk, merging contiguous reads."""
        item = self.dtype.itemsize
        for chunk, box in self._boxes:
            spans: list[tuple[int, int]] = []
            begin = end = -1
            for piece in box.pieces(first, last):
                for place, at, length in piece.common_runs():
                    if at != end and spans:
                        yield Transfer(chunk.path, chunk.start + begin * item, spans)
                        spans = []
                    if not spans:
                        begin = at
                    spans.append((place * item, (place + length) * item))
                    end = at + length
            if spans:
                yield Transfer(chunk.path, chunk.start + begin * item, spans)


def tiled(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether boxes, (origin, sizes) each, fill a tensor of that shape without overlap."""
    if any(
        a < 0 or n < 0 or a + n > size
        for origin, sizes in boxes
        for a, n, size in zip(origin, sizes, shape, strict=True)
    ):
        return False
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    return _is_cut(shape, boxes) or _is_grid(shape, boxes) or _adds_up(shape, boxes)


def tiled_in_part(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether boxes fill, without overlap, some of the slabs of a tensor of that shape along its
    first dimension, and nothing else.
    """
    slabs: dict[tuple[int, int], list[tuple[Shape, Shape]]] = {}
    for origin, sizes in boxes:
        slabs.setdefault((origin[0], sizes[0]), []).append(((0, *origin[1:]), sizes))
    end = 0
    for start, size in sorted(slabs):
        if start < end or start + size > shape[0]:
            return False
        end = start + size
    return all(tiled((size, *shape[1:]), slab) for (_, size), slab in slabs.items())


def _is_cut(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether the boxes come from cutting the first dimension, then the second of each slab, and so
    on.

    Takes as many steps as there are boxes.
    """
    if not shape:
        return len(boxes) == 1
    slabs: dict[tuple[int, int], list[tuple[Shape, Shape]]] = {}
    for origin, sizes in boxes:
        slabs.setdefault((origin[0], sizes[0]), []).append((origin[1:], sizes[1:]))
    end = 0
    for start, size in sorted(slabs):
        if start != end or not size:
            return False
        end = start + size
    return end == shape[0] and all(tiled(shape[1:], slab) for slab in slabs.values())


def _is_grid(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether the boxes come from straight cuts through the whole tensor."""
    cuts = []
    for dim, size in enumerate(shape):
        starts = sorted({origin[dim] for origin, _ in boxes})
        cuts.append({begin: end - begin for begin, end in pairwise((*starts, size))})
    origins = {origin for origin, _ in boxes}
    return len(origins) == len(boxes) == math.prod(map(len, cuts)) and all(
        n == cut[at]
        for origin, sizes in boxes
        for at, n, cut in zip(origin, sizes, cuts, strict=True)
    )


def _adds_up(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether every element is in exactly one box, however they are cut.

    The corners of a box count with alternating signs. Those of all boxes add up to the corners of
    the whole tensor if and only if the boxes fill it without overlap.
    """
    cut = [dim for dim, size in enumerate(shape) if any(n[dim] != size for _, n in boxes)]
    if len(boxes) << len(cut) > MAX_CORNERS:
        return False
    total: Counter[Shape] = Counter()
    counted = [*((1, box) for box in boxes), (-1, ((0,) * len(shape), shape))]
    for once, (origin, sizes) in counted:
        ends = [((origin[dim], 1), (origin[dim] + sizes[dim], -1)) for dim in cut]
        for corner in product(*ends):
            total[tuple(at for at, _ in corner)] += once * math.prod(sign for _, sign in corner)
    return not any(total.values())
