"""Ranges of a flat HF tensor as strided pieces of parameters, along the blocks of their rows.

Pure arithmetic in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from .blocks import Block, Shape

Box = tuple[tuple[int, int], ...]
"""For each dimension, the first index and the one after the last."""


class Piece(NamedTuple):
    """Elements shared by a range of an HF tensor and a flat parameter: a strided box of both.

    Offsets and strides are in elements; `hf_offset` counts from the start of the range.
    """

    sizes: Shape
    hf_offset: int
    hf_strides: Shape
    offset: int
    strides: Shape

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def is_plain(self) -> bool:
        """Whether the elements lie in runs that are contiguous on both sides."""
        return self.strides[-1] == self.hf_strides[-1] == 1

    def common_runs(self) -> Iterator[tuple[int, int, int]]:
        """(place in the range, place in the parameter, length) of runs contiguous on both sides."""
        inner = len(self.sizes) - self.is_plain
        length = math.prod(self.sizes[inner:])
        for index in product(*map(range, self.sizes[:inner])):
            yield (
                self.hf_offset + _dot(index, self.hf_strides),
                self.offset + _dot(index, self.strides),
                length,
            )

    def runs(self) -> Iterator[tuple[int, int]]:
        """(place in the parameter, length) of runs contiguous there, in the order of `sizes`."""
        inner, length = len(self.sizes), 1
        while inner and self.strides[inner - 1] == length:
            inner -= 1
            length *= self.sizes[inner]
        for index in product(*map(range, self.sizes[:inner])):
            yield self.offset + _dot(index, self.strides), length


@dataclass(frozen=True)
class Correspondence:
    """A block, prepared for queries about many ranges.

    For each dimension of the block: its start and step in the viewed HF tensor, and strides in
    elements on both sides. `order` lists these dimensions in the parameter's order.
    """

    hf_view: Shape
    starts: Shape
    steps: Shape
    counts: Shape
    hf_strides: Shape
    offset: int
    strides: Shape
    order: Shape

    @classmethod
    def of(cls, block: Block) -> Correspondence:
        """The correspondence of a block, whose indices can have positive steps."""
        dims = max(len(block.hf_view), len(block.shard_view))
        hf_view, hf_index = _deepened(block.hf_view, block.hf_index, dims)
        view, index = _deepened(block.shard_view, block.shard_index, dims)
        hf, own = _bounds(hf_view, hf_index), _bounds(view, index)
        order = list(range(dims))
        if block.transposed:
            order[-2:] = reversed(order[-2:])
        assert [hf[i][2] for i in order] == [count for _, _, count in own], block
        strides = [own[i][1] * stride for i, stride in enumerate(_strides(view))]
        return cls(
            hf_view=hf_view,
            starts=tuple(start for start, _, _ in hf),
            steps=tuple(step for _, step, _ in hf),
            counts=tuple(count for _, _, count in hf),
            hf_strides=tuple(_strides(hf_view)),
            offset=sum(own[i][0] * stride for i, stride in enumerate(_strides(view))),
            # A swap is its own inverse, so `order` also maps back.
            strides=tuple(strides[i] for i in order),
            order=tuple(order),
        )

    @property
    def elements(self) -> int:
        """The number of elements of the whole block."""
        return math.prod(self.counts)

    @property
    def is_plain(self) -> bool:
        """Whether every piece of the block is plain, whatever the range."""
        whole = self._piece((0,) * len(self.counts), self.counts, 0)
        return whole.is_plain

    @property
    def span(self) -> tuple[int, int]:
        """The first element in the HF tensor, and the one after the last."""
        last = [
            a + (n - 1) * s for a, s, n in zip(self.starts, self.steps, self.counts, strict=True)
        ]
        return _dot(self.starts, self.hf_strides), _dot(last, self.hf_strides) + 1

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """The block's share of elements `first` to `last` (exclusive) of the HF tensor."""
        for box in boxes(self.hf_view, first, last):
            low, high = [], []
            for (begin, end), start, step, count in zip(
                box, self.starts, self.steps, self.counts, strict=True
            ):
                low.append(max(0, -(-(begin - start) // step)))
                high.append(min(count, -(-(end - start) // step)))
            if all(a < b for a, b in zip(low, high, strict=True)):
                yield self._piece(low, high, first)

    def _piece(self, low: Sequence[int], high: Sequence[int], first: int) -> Piece:
        at = [a + i * s for a, i, s in zip(self.starts, low, self.steps, strict=True)]
        hf_strides = [s * n for s, n in zip(self.hf_strides, self.steps, strict=True)]
        dims = [(high[i] - low[i], hf_strides[i], self.strides[i]) for i in self.order]
        sizes, hf, own = _merged(dims)
        return Piece(
            sizes,
            _dot(at, self.hf_strides) - first,
            hf,
            self.offset + _dot(low, self.strides),
            own,
        )


def boxes(shape: Shape, first: int, last: int) -> Iterator[Box]:
    """Elements `first` to `last` (exclusive) of a flat tensor of that shape as boxes, in order."""
    if first >= last:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (low, skipped), (high, more) = divmod(first, inner), divmod(last, inner)
    if low == high:
        for box in boxes(shape[1:], skipped, more):
            yield ((low, low + 1), *box)
        return
    if skipped:
        for box in boxes(shape[1:], skipped, inner):
            yield ((low, low + 1), *box)
        low += 1
    if low < high:
        yield ((low, high), *((0, size) for size in shape[1:]))
    for box in boxes(shape[1:], 0, more):
        yield ((high, high + 1), *box)


def _merged(dims: Sequence[tuple[int, int, int]]) -> tuple[Shape, Shape, Shape]:
    """(size, stride, stride) of each dimension, merging those that form one run on both sides."""
    kept: list[tuple[int, int, int]] = []
    for size, hf, own in dims:
        if size == 1:
            continue
        if kept and kept[-1][1] == size * hf and kept[-1][2] == size * own:
            kept[-1] = (kept[-1][0] * size, hf, own)
        else:
            kept.append((size, hf, own))
    sizes, hf_strides, strides = zip(*(kept or [(1, 1, 1)]), strict=True)
    return sizes, hf_strides, strides


def _deepened(view: Shape, index: tuple[slice, ...], dims: int) -> tuple[Shape, tuple[slice, ...]]:
    """The same elements in `dims` dimensions, with new ones of size 1 in front."""
    new = dims - len(view)
    return (1,) * new + view, (slice(None),) * new + index


def _bounds(shape: Shape, index: tuple[slice, ...]) -> list[tuple[int, int, int]]:
    """(start, step, count) of each dimension."""
    full = (*index, *(slice(None),) * (len(shape) - len(index)))
    ranges = [range(*part.indices(size)) for part, size in zip(full, shape, strict=True)]
    assert all(r.step > 0 for r in ranges), index
    return [(r.start, r.step, len(r)) for r in ranges]


def _strides(shape: Shape) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    # Not strict: an index over the outer dimensions is paired with the strides of all.
    return sum(i * s for i, s in zip(index, strides, strict=False))
