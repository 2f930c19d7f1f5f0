"""Maps ranges of a rank's flat parameter to boxes of the unsharded parameter.

Pure arithmetic, in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, product
from typing import NamedTuple

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.blocks import Row, Shape
from megatron_policy.converters.rows.regions import boxes, dot, strides
from megatron_policy.converters.rows.shards import spans


class Slice(NamedTuple):
    """A box of the unsharded parameter whose elements are contiguous in the flat shard."""

    own: int
    """The first element's index in the flat shard."""
    origin: Shape
    sizes: Shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


_Cuts = list[tuple[int, int, int]]
"""Along a dimension: first and last (exclusive) index in the shard, and how far to move them."""


def cut_slices(
    row: Row, architecture: Architecture, rank: int, size: int, first: int, last: int
) -> Iterator[Slice]:
    """Elements `first` to `last` (exclusive) of the flat shard, without padding, in order."""
    if row.ranges is not None and size > 1:
        start, _ = row.ranges[rank]
        for piece in cut_slices(row, architecture, 0, 1, start + first, start + last):
            yield piece._replace(own=piece.own - start)
        return
    shape = row.local_shape(architecture, size)
    steps, held = strides(shape), spans(row, architecture, rank, size)
    for box in boxes(shape, first, last):
        cuts = [
            [
                (max(low, span.own), min(high, span.own + span.length), span.whole - span.own)
                for span in along
                if low < span.own + span.length and span.own < high
            ]
            for (low, high), along in zip(box, held, strict=True)
        ]
        for single in _outer(shape, cuts):
            for cut in product(*single):
                origin = [low for low, _, _ in cut]
                whole = tuple(low + move for low, _, move in cut)
                yield Slice(dot(origin, steps), whole, tuple(high - low for low, high, _ in cut))


def _outer(shape: Shape, cuts: list[_Cuts]) -> Iterator[list[_Cuts]]:
    """Split the cuts into single indices along every dimension outside the innermost one that is
    cut, so that each result is contiguous in the shard.
    """
    inside = [dim for dim, of in enumerate(cuts) if [(a, b) for a, b, _ in of] != [(0, shape[dim])]]
    if not inside:
        yield cuts
        return
    singles = [
        [(at, at + 1, move) for low, high, move in of for at in range(low, high)]
        for of in cuts[: inside[-1]]
    ]
    for index in product(*singles):
        yield [*([one] for one in index), *cuts[inside[-1] :]]


def cut_pieces(piece: Slice, most: int) -> Iterator[Slice]:
    """Split the slice into pieces of at most `most` elements along whole rows."""
    dim = next((n for n, size in enumerate(piece.sizes) if size > 1), None)
    if piece.elements <= most or dim is None:
        yield piece
        return
    inner = math.prod(piece.sizes[dim + 1 :])
    step = max(1, most // inner)
    for row in range(0, piece.sizes[dim], step):
        count = min(step, piece.sizes[dim] - row)
        part = Slice(
            piece.own + row * inner,
            (*piece.origin[:dim], piece.origin[dim] + row, *piece.origin[dim + 1 :]),
            (*piece.sizes[:dim], count, *piece.sizes[dim + 1 :]),
        )
        yield from cut_pieces(part, most) if part.elements > most else (part,)


def clip_rows(piece: Slice, first: int, shape: Shape) -> Iterator[Slice]:
    """What of the slice is in the part of that shape which begins with row `first` of the
    parameter, as a slice of the part; nothing, or one.
    """
    if not shape:
        yield piece
        return
    (top, *rest), inner = piece.origin, piece.sizes[1:]
    low, high = max(top, first), min(top + piece.sizes[0], first + shape[0])
    if low < high:
        own = piece.own + (low - top) * math.prod(inner)
        yield Slice(own, (low - first, *rest), (high - low, *inner))


def divide(lengths: Iterable[tuple[int, int]], index: int, count: int) -> list[tuple[int, int]]:
    """Divide tensors that `count` ranks all hold, given as (elements, bytes of each): for each
    tensor the elements, first to last (exclusive), of rank `index`. Ranks get equal runs of bytes
    in order.
    """
    held = list(lengths)
    ends = list(accumulate(elements * size for elements, size in held))
    total = ends[-1] if ends else 0
    low, high = total * index // count, total * (index + 1) // count
    return [
        (
            min(elements, max(0, -(-(low - end + elements * size) // size))),
            min(elements, max(0, -(-(high - end + elements * size) // size))),
        )
        for (elements, size), end in zip(held, ends, strict=True)
    ]
