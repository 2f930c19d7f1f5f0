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
from .regions import Region, bounds, boxes, deepened, dot, regions


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
                self.hf_offset + dot(index, self.hf_strides),
                self.offset + dot(index, self.strides),
                length,
            )

    def runs(self) -> Iterator[tuple[int, int]]:
        """(place in the parameter, length) of runs contiguous there, in the order of `sizes`."""
        inner, length = len(self.sizes), 1
        while inner and self.strides[inner - 1] == length:
            inner -= 1
            length *= self.sizes[inner]
        for index in product(*map(range, self.sizes[:inner])):
            yield self.offset + dot(index, self.strides), length


@dataclass(frozen=True)
class Correspondence:
    """A block, prepared for queries about many ranges.

    For each dimension of the block: its start and step in the viewed HF tensor. `hf` and `own` are
    the block in the flat HF tensor and in the flat parameter; `order` lists its dimensions in the
    parameter's order.
    """

    hf_view: Shape
    starts: Shape
    steps: Shape
    hf: Region
    own: Region
    order: Shape

    @classmethod
    def of(cls, block: Block) -> Correspondence:
        """The correspondence of a block, whose indices can have positive steps."""
        hf, own = regions(block)
        dims = len(hf.size)
        view, index = deepened(block.hf_view, block.hf_index, dims)
        taken = bounds(view, index)
        order = list(range(dims))
        if block.transposed:
            order[-2:] = reversed(order[-2:])
        return cls(
            hf_view=view,
            starts=tuple(start for start, _, _ in taken),
            steps=tuple(step for _, step, _ in taken),
            hf=hf,
            own=own,
            order=tuple(order),
        )

    @property
    def elements(self) -> int:
        """The number of elements of the whole block."""
        return self.hf.elements

    @property
    def is_plain(self) -> bool:
        """Whether every piece of the block is plain, whatever the range."""
        whole = self._piece((0,) * len(self.starts), self.hf.size, 0)
        return whole.is_plain

    @property
    def span(self) -> tuple[int, int]:
        """The first element in the HF tensor, and the one after the last."""
        last = [count - 1 for count in self.hf.size]
        return self.hf.offset, self.hf.offset + dot(last, self.hf.stride) + 1

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """The block's share of elements `first` to `last` (exclusive) of the HF tensor."""
        for box in boxes(self.hf_view, first, last):
            low, high = [], []
            for (begin, end), start, step, count in zip(
                box, self.starts, self.steps, self.hf.size, strict=True
            ):
                low.append(max(0, -(-(begin - start) // step)))
                high.append(min(count, -(-(end - start) // step)))
            if all(a < b for a, b in zip(low, high, strict=True)):
                yield self._piece(low, high, first)

    def _piece(self, low: Sequence[int], high: Sequence[int], first: int) -> Piece:
        # Dimensions that form one run on both sides are merged.
        dims: list[tuple[int, int, int]] = []
        for i in self.order:
            size, hf, own = high[i] - low[i], self.hf.stride[i], self.own.stride[i]
            if size == 1:
                continue
            if dims and dims[-1][1] == size * hf and dims[-1][2] == size * own:
                dims[-1] = (dims[-1][0] * size, hf, own)
            else:
                dims.append((size, hf, own))
        sizes, hf_strides, strides = zip(*(dims or [(1, 1, 1)]), strict=True)
        return Piece(
            sizes,
            self.hf.offset + dot(low, self.hf.stride) - first,
            hf_strides,
            self.own.offset + dot(low, self.own.stride),
            strides,
        )
