"""Rows of projections whose outputs are of several kinds: unequal sections of one parameter, of
which ranks share each by its heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_policy.converters.architecture import Architecture, Attention, HeadRows, LayerPart

from .blocks import Block, Shape, even, nth
from .kinds import ALL, RowBase


class RowRun(NamedTuple):
    """Consecutive rows of an HF tensor that are consecutive in the unsharded parameter."""

    part: int
    start: int
    rows: int


def cut_runs(
    runs: Iterable[RowRun], shapes: tuple[Shape, ...], local: Shape, rank: int
) -> Iterator[Block]:
    """The blocks of a rank that holds a range of a parameter's rows, which are `runs` in order."""
    low, place = rank * local[0], 0
    for part, start, rows in runs:
        first, last = max(place, low), min(place + rows, low + local[0])
        if first < last:
            move = start - place
            taken = slice(first + move, last + move)
            yield Block(part, shapes[part], (taken,), local, (slice(first - low, last - low),))
        place += rows


@dataclass(frozen=True)
class GatedQkv(RowBase):
    """Fused attention input with a gate: for each group its queries, their gates, its key and its
    value. HF has each head's gate below its query, in one tensor.
    """

    tail: tuple[str | int, ...]
    """Dimensions after the rows: ("hidden_size",) of a weight, () of a bias."""
    part: type[LayerPart] | None = field(default=Attention, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        rows = self.measure(arch, ("gated_query_size", "kv_size", "kv_size"))
        return tuple((size, *self.measure(arch, self.tail)) for size in rows)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows = sum(rows for rows, *_ in self.hf_shapes(arch))
        return (even(rows, size, self), *self.measure(arch, self.tail))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        names = ("num_query_groups", "heads_per_group", "kv_channels")
        groups, per, head, *tail = self.measure(arch, (*names, *self.tail))
        local, shapes = self.local_shape(arch, size), self.hf_shapes(arch)
        if groups % size:  # more ranks than groups split rows evenly, even inside a head
            return tuple(cut_runs(self._runs(groups, per, head), shapes, local, rank))
        mine = nth(rank, groups // size)
        fused = (groups // size, 2 * per + 2, 1, head, *tail)
        queries = (groups, per, 2, head, *tail)
        one = (groups, 1, 1, head, *tail)
        return (
            Block(0, queries, (mine, *ALL, nth(0, 1)), fused, (*ALL, nth(0, per))),
            Block(0, queries, (mine, *ALL, nth(1, 1)), fused, (*ALL, nth(1, per))),
            Block(1, one, (mine,), fused, (*ALL, nth(2 * per, 1))),
            Block(2, one, (mine,), fused, (*ALL, nth(2 * per + 1, 1))),
        )

    def _runs(self, groups: int, per: int, head: int) -> Iterator[RowRun]:
        for group in range(groups):
            for gate in (0, 1):
                for query in range(group * per, (group + 1) * per):
                    yield RowRun(0, (2 * query + gate) * head, head)
            yield from (RowRun(part, group * head, head) for part in (1, 2))


@dataclass(frozen=True)
class Sections(RowBase):
    """Sections one below another: each rank holds its heads of the first, then its heads of the
    second, and so on. HF has them in this order too, in one tensor or in several. Of a section with
    fewer heads than ranks, a rank holds its share of the rows of a head.
    """

    sections: tuple[tuple[HeadRows, ...], ...]
    """Those of each HF tensor."""
    tail: tuple[str | int, ...]
    """Dimensions after the rows: ("hidden_size",) of a projection, (1, "taps") of a convolution."""
    by: str = field(default="", kw_only=True)
    """The heads by which HF tensors go, each with its share of all of their sections; "": section
    by section.
    """

    def name_rows(self, arch: Architecture) -> tuple[tuple[str, int], ...]:
        """Names and rows of all sections of the whole parameter."""
        every = [section for each in self.sections for section in each]
        rows = self._rows(arch, tuple(every))
        return tuple((section.name, n) for section, n in zip(every, rows, strict=True))

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        tail = self.measure(arch, self.tail)
        return tuple((sum(self._rows(arch, each)), *tail) for each in self.sections)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows = [rows for each in self.sections for rows in self._rows(arch, each, size)]
        return (sum(rows), *self.measure(arch, self.tail))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        local, shapes, own = self.local_shape(arch, size), self.hf_shapes(arch), 0
        found = []
        for part, sections in enumerate(self.sections):
            before = 0
            for rows in self._rows(arch, sections):
                for start, count in self._find(arch, before, rows, shapes[part][0], rank, size):
                    taken, place = slice(start, start + count), slice(own, own + count)
                    found.append(Block(part, shapes[part], (taken,), local, (place,)))
                    own += count
                before += rows
        return tuple(found)

    def _find(
        self, arch: Architecture, before: int, rows: int, total: int, rank: int, size: int
    ) -> Iterator[tuple[int, int]]:
        """Where a rank's share of a section of so many rows is in its HF tensor, as first row and
        number of rows; the tensor has `total` rows, `before` of them in sections before this one.
        """
        if not self.by:
            yield before + rank * (rows // size), rows // size
            return
        (heads,) = self.measure(arch, (self.by,))
        mine = even(heads, size, self)
        for head in range(rank * mine, (rank + 1) * mine):
            yield (head * total + before) // heads, rows // heads

    def _rows(self, arch: Architecture, sections: tuple[HeadRows, ...], size: int = 1) -> list[int]:
        """Rows of each of these sections on one of `size` ranks."""
        sizes = (self.measure(arch, section[:2]) for section in sections)
        return [
            even(heads, size, self) * each
            if self.by or size <= heads
            else even(heads * each, size, self)
            for heads, each in sizes
        ]
