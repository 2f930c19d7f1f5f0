"""A tensor that lies in chunks in files: which bytes of which file are a range of its elements.

Knows no formats of files and opens none.
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

from .blocks import Block, Shape
from .runs import Correspondence

MAX_CORNERS = 10_000_000
"""Of chunks that are cut in no regular way: it bounds the time to tell whether they fill a tensor.
"""

if TYPE_CHECKING:
    from torch import dtype


class Chunk(NamedTuple):
    """A box of a tensor, row by row in a file from byte `start` on."""

    path: Path
    start: int
    origin: Shape
    sizes: Shape


class Transfer(NamedTuple):
    """Bytes that follow each other in a file and lie in `spans`, (first, end), of a range."""

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
        """A tensor whose bytes follow each other in a file from `start` on."""
        return cls(shape, dtype, [Chunk(path, start, (0,) * len(shape), shape)])

    def transfers(self, first: int, count: int) -> Iterator[Transfer]:
        """Where elements `first` to `first + count` lie, flat, in `spans` of a buffer for them."""
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
            # Rows that the files have beyond the tensor's shape are never asked for.
            view = (max(self.shape[0], chunk.origin[0] + chunk.sizes[0]), *self.shape[1:])
            block = Block(0, view, index, chunk.sizes, (slice(None),))
            boxes.append((chunk, Correspondence.of(block)))
        return boxes

    def _scattered(self, first: int, last: int) -> Iterator[Transfer]:
        """The same for chunks of any form: what a chunk has of the range comes in one go."""
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


def _is_cut(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether the boxes are what cuts through the first dimension leave of the tensor, cuts through
    the second of each of those slabs, and so on: told in as many steps as there are boxes.
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
    """Whether the boxes are what straight cuts through the whole tensor leave."""
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
    """Whether every element is in just one box, however these are cut.

    The corners of a box count with alternating signs. Those of all boxes add up to the corners of
    the whole tensor if the boxes fill it without overlap, and only then.
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
