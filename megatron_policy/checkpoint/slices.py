"""Maps ranges of a rank's flat parameter to boxes of the unsharded parameter.

Pure arithmetic, in elements, along the stripes that a row splits over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.blocks import Row, Shape
from megatron_policy.converters.rows.runs import Box, boxes


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


class Span(NamedTuple):
    """Indices along the sharded dimension: in the shard, and in the whole."""

    own: int
    whole: int
    length: int


def whole_shape(row: Row, architecture: Architecture) -> Shape:
    """Shape of the unsharded parameter, without the padding of a vocabulary."""
    first, *tail = row.local_shape(architecture, 1)
    return (first - row.pad_rows(architecture, 0, 1), *tail)


def spans(row: Row, architecture: Architecture, rank: int, size: int) -> tuple[Span, ...]:
    """Where shard `rank` of `size` is in the whole; padding is left out."""
    dim = 0 if row.shard_dim is None else row.shard_dim
    local = row.local_shape(architecture, size)[dim]
    real = local - row.pad_rows(architecture, rank, size)
    stripe = local // row.stripes
    before = 0 if row.shard_dim is None else rank * stripe
    whole = row.local_shape(architecture, 1)[dim] // row.stripes
    found = [
        Span(n * stripe, n * whole + before, min(stripe, real - n * stripe))
        for n in range(row.stripes)
    ]
    return tuple(span for span in found if span.length > 0)


def slices(
    row: Row, architecture: Architecture, rank: int, size: int, first: int, last: int
) -> Iterator[Slice]:
    """Elements `first` to `last` (exclusive) of the flat shard, without padding, in order."""
    dim = 0 if row.shard_dim is None else row.shard_dim
    shape = row.local_shape(architecture, size)
    strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
    for box in boxes(shape, first, last):
        for span in spans(row, architecture, rank, size):
            low, high = max(box[dim][0], span.own), min(box[dim][1], span.own + span.length)
            if low >= high:
                continue
            cut: Box = (*box[:dim], (low, high), *box[dim + 1 :])
            assert cut == box or all(b - a == 1 for a, b in box[:dim]), (row, box)
            origin = [begin for begin, _ in cut]
            own = sum(at * stride for at, stride in zip(origin, strides, strict=True))
            origin[dim] += span.whole - span.own
            yield Slice(own, tuple(origin), tuple(end - begin for begin, end in cut))


def in_pieces(piece: Slice, most: int) -> Iterator[Slice]:
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
        yield from in_pieces(part, most) if part.elements > most else (part,)


def shares(lengths: Iterable[tuple[int, int]], index: int, count: int) -> list[tuple[int, int]]:
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
