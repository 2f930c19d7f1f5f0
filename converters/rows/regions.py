"""Boxes of flat tensors as strided regions: what a block is on either side.

Pure arithmetic, in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .blocks import Block, Shape

Indices = npt.NDArray[np.int64]
"""Indices of elements, int64 `[N]`."""

Box = tuple[tuple[int, int], ...]
"""For each dimension, the first index and the one after the last."""


class Region(NamedTuple):
    """A box of a flat tensor: the arguments of `as_strided`."""

    size: Shape
    stride: Shape
    offset: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    @property
    def ends(self) -> tuple[int, int]:
        """The flat indices of the first element and the last."""
        return self.offset, self.offset + dot([size - 1 for size in self.size], self.stride)

    def cut(self, box: Box) -> Region:
        """The part of it in `box`."""
        return Region(
            tuple(high - low for low, high in box),
            self.stride,
            self.offset + dot([low for low, _ in box], self.stride),
        )

    def find(self, flat: Indices) -> tuple[npt.NDArray[np.bool_], list[Indices]]:
        """Which flat indices `[N]` are in the region, as bool `[N]`, and the index of each in
        every dimension, `[N]` each; only those of indices in the region mean anything.
        """
        rest, inside = flat - self.offset, flat >= self.offset
        index = [np.zeros_like(rest) for _ in self.size]
        # The largest stride first: what is left is always less than one step of it.
        for dim in sorted(range(len(self.size)), key=lambda dim: -self.stride[dim]):
            if self.size[dim] > 1:
                index[dim], rest = np.divmod(rest, self.stride[dim])
                inside &= (index[dim] >= 0) & (index[dim] < self.size[dim])
        return inside & (rest == 0), index

    def flat(self, index: Sequence[Indices]) -> Indices:
        """The flat index, int64 `[N]`, of the elements at `index`; inverse of `find`."""
        found = np.full_like(index[0], self.offset)
        for at, stride in zip(index, self.stride, strict=True):
            found += at * stride
        return found


class Run(NamedTuple):
    """Elements that are contiguous on both sides: the first index on each, and how many."""

    hf: int
    own: int
    length: int


def regions(block: Block) -> tuple[Region, Region]:
    """The block in the flat HF tensor and in the flat shard, as regions of one size: element by
    element the same, in the order of the HF tensor's dimensions.
    """
    dims = max(len(block.hf_view), len(block.shard_view))
    hf = region(*deepened(block.hf_view, block.hf_index, dims))
    own = region(*deepened(block.shard_view, block.shard_index, dims))
    if block.transposed:
        own = Region(_swapped(own.size), _swapped(own.stride), own.offset)
    assert hf.size == own.size, block
    return hf, own


def region(shape: Shape, index: tuple[slice, ...]) -> Region:
    """What `index` takes of a contiguous tensor of that shape."""
    steps, taken = strides(shape), bounds(shape, index)
    return Region(
        tuple(count for _, _, count in taken),
        tuple(step * stride for (_, step, _), stride in zip(taken, steps, strict=True)),
        dot([start for start, _, _ in taken], steps),
    )


def flatten(region: Region) -> Region:
    """The same elements in the same order, in as few dimensions as they need, at least one."""
    size, stride = [1], [1]
    for length, step in zip(reversed(region.size), reversed(region.stride), strict=True):
        if length == 1:
            continue
        if size[-1] == 1:
            size[-1], stride[-1] = length, step
        elif step == size[-1] * stride[-1]:
            size[-1] *= length
        else:
            size.append(length)
            stride.append(step)
    return Region(tuple(reversed(size)), tuple(reversed(stride)), region.offset)


def runs(hf: Region, own: Region) -> tuple[Run, ...]:
    """The elements of two regions of one size, in the fewest runs that are contiguous in both."""
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


def deepened(view: Shape, index: tuple[slice, ...], dims: int) -> tuple[Shape, tuple[slice, ...]]:
    """The same elements in `dims` dimensions, with new ones of size 1 in front."""
    new = dims - len(view)
    return (1,) * new + view, (slice(None),) * new + index


def bounds(shape: Shape, index: tuple[slice, ...]) -> list[tuple[int, int, int]]:
    """(start, step, count) of each dimension that `index` takes; steps must be positive."""
    full = (*index, *(slice(None),) * (len(shape) - len(index)))
    ranges = [range(*part.indices(size)) for part, size in zip(full, shape, strict=True)]
    assert all(r.step > 0 for r in ranges), index
    return [(r.start, r.step, len(r)) for r in ranges]


def strides(shape: Shape) -> Shape:
    """Those of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def dot(index: Sequence[int], steps: Sequence[int]) -> int:
    """The flat index of `index`, which can leave out inner dimensions."""
    return sum(at * step for at, step in zip(index, steps, strict=False))


def _swapped(values: Shape) -> Shape:
    return (*values[:-2], values[-1], values[-2])
