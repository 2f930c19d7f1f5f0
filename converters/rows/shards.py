"""Which elements of a parameter a rank's shard holds, derived from the blocks of its row alone.

A shard takes whole runs of indices along each dimension of the unsharded parameter: that of a
column-parallel linear some of its rows, that of a gated MLP some of either half.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_policy.converters.architecture import Architecture
from megatron_policy.errors import ConversionError

from .blocks import Row, Shape, blocks_of
from .regions import Indices, Region, regions, strides


class Span(NamedTuple):
    """A run of indices along a dimension: the first in the shard, the first in the unsharded
    parameter, and how many.
    """

    own: int
    whole: int
    length: int


def unpadded_shape(row: Row, arch: Architecture) -> Shape:
    """Shape of the unsharded parameter, without the padding of a vocabulary."""
    first, *tail = row.local_shape(arch, 1)
    return (first - row.pad_rows(arch, 0, 1), *tail)


@lru_cache(maxsize=4096)
def spans(row: Row, arch: Architecture, rank: int, size: int) -> tuple[tuple[Span, ...], ...]:
    """For each dimension, where shard `rank` of `size` is in the unsharded parameter; padding is in
    no span. ConversionError, naming legal sizes, if the row cannot be split over `size` ranks.
    """
    held, whole = _sides(row, arch, rank, size), _sides(row, arch, 0, 1)
    local, full = row.local_shape(arch, size), row.local_shape(arch, 1)
    return tuple(tuple(_runs(_indices(held, whole, local, full, dim))) for dim in range(len(local)))


def is_split(row: Row, arch: Architecture, size: int) -> bool:
    """Whether `size` ranks each hold another part of the parameter, rather than all of it."""
    return spans(row, arch, 0, size) != spans(row, arch, size - 1, size)


def split_dimension(row: Row, arch: Architecture) -> int | None:
    """The dimension along which several ranks split the parameter; None if each holds all of it."""
    for size in range(2, max(row.local_shape(arch, 1)) + 1):
        try:
            ends = spans(row, arch, 0, size), spans(row, arch, size - 1, size)
        except ConversionError:
            continue
        return next((dim for dim, (a, b) in enumerate(zip(*ends, strict=True)) if a != b), None)
    return None


_Side = tuple[int, Region, Region]
"""Of a block: the number of its HF tensor, its region there, and its region in the parameter."""


def _sides(row: Row, arch: Architecture, rank: int, size: int) -> list[_Side]:
    return [(block.part, *regions(block)) for block in blocks_of(row, arch, rank, size)]


def _indices(held: list[_Side], whole: list[_Side], local: Shape, full: Shape, dim: int) -> Indices:
    """For each index of the shard along `dim`, that of the same element in the unsharded
    parameter; -1 for padding. Follows the elements whose other indices are 0.
    """
    line = np.arange(local[dim], dtype=np.int64) * strides(local)[dim]
    found = np.full_like(line, -1)
    for part, hf, own in held:
        inside, index = own.find(line)
        at = hf.flat(index)
        for other, whole_hf, whole_own in whole:
            if other == part:
                there, place = whole_hf.find(at)
                there = there & inside
                found[there] = whole_own.flat(place)[there] // strides(full)[dim] % full[dim]
    return found


def _runs(indices: Indices) -> Iterator[Span]:
    """Consecutive indices, int64 `[N]`, as spans; those below 0 are in none."""
    new = (indices[1:] != indices[:-1] + 1) | (indices[:-1] < 0)
    starts = [0, *(np.flatnonzero(new) + 1).tolist(), len(indices)]
    for first, end in pairwise(starts):
        if (index := int(indices[first])) >= 0:
            yield Span(first, index, end - first)
