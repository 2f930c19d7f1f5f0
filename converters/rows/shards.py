"""Which elements of a parameter a rank's shard holds, derived from the blocks of its row alone.

A shard takes whole runs of indices along each dimension of the unsharded parameter: that of a
column-parallel linear some of its rows, that of a gated MLP some of either half.
"""

from __future__ import annotations

import math
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
    """Shape of the unsharded parameter in checkpoints, without the padding of a vocabulary."""
    row = _saved(row)
    first, *tail = row.local_shape(arch, 1)
    return (first - row.pad_rows(arch, 0, 1), *tail)


@lru_cache(maxsize=4096)
def spans(row: Row, arch: Architecture, rank: int, size: int) -> tuple[tuple[Span, ...], ...]:
    """For each dimension, where shard `rank` of `size` is in the unsharded parameter that
    checkpoints have; padding is in no span. The shard is the Cartesian product of these indices.

    ConversionError, naming legal sizes, if the row cannot be split over `size` ranks, and if its
    blocks take something else than whole runs of indices along each dimension.
    """
    local, full = row.local_shape(arch, size), _saved(row).local_shape(arch, 1)
    held, whole = _sides(row, arch, rank, size), _sides(_saved(row), arch, 0, 1)
    if row.within is not None:
        held = [(row.within.parts[part], hf, own) for part, hf, own in held]
    steps, places = strides(local), []
    for dim in range(len(local)):
        line = np.arange(local[dim], dtype=np.int64) * steps[dim]
        found = _to_whole(line, held, whole)
        places.append(np.where(found < 0, -1, found // strides(full)[dim] % full[dim]))
    result = tuple(tuple(_runs(indices)) for indices in places)
    corners = _corners(held, whole, local)
    predicted = sum(
        at[i] * step for at, i, step in zip(places, corners, strides(full), strict=True)
    )
    real = np.all([at[i] >= 0 for at, i in zip(places, corners, strict=True)], axis=0)
    flat = np.sum([i * step for i, step in zip(corners, steps, strict=True)], axis=0)
    count = math.prod(sum(span.length for span in along) for along in result)
    held_elements = sum(own.elements for _, _, own in held)
    if (
        count != held_elements
        or (_to_whole(flat, held, whole) != np.where(real, predicted, -1)).any()
    ):
        raise ConversionError(
            f"{row.megatron}: shard {rank} of {size} of this {type(row).__name__} row does not "
            "hold the same indices everywhere along each dimension, which checkpoints need: change "
            "its blocks()"
        )
    return result


def is_split(row: Row, arch: Architecture, size: int) -> bool:
    """Whether `size` ranks each hold another part of the parameter, rather than all of it."""
    if row.ranges is not None:
        return size > 1
    return size > 1 and spans(row, arch, 0, size) != spans(row, arch, size - 1, size)


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


def _saved(row: Row) -> Row:
    return row if row.within is None else row.within.row


def _sides(row: Row, arch: Architecture, rank: int, size: int) -> list[_Side]:
    return [(block.part, *regions(block)) for block in blocks_of(row, arch, rank, size)]


def _to_whole(flat: Indices, held: list[_Side], whole: list[_Side]) -> Indices:
    """For flat indices `[N]` of a shard, those of the same elements in the flat unsharded
    parameter; -1 for padding.
    """
    part, at = np.full_like(flat, -1), np.zeros_like(flat)
    for number, hf, own in held:
        inside, index = own.find(flat)
        part[inside], at[inside] = number, hf.flat(index)[inside]
    found = np.full_like(flat, -1)
    for number, hf, own in whole:
        inside, index = hf.find(at)
        inside &= part == number
        found[inside] = own.flat(index)[inside]
    return found


def _corners(held: list[_Side], whole: list[_Side], local: Shape) -> list[Indices]:
    """Indices of a shard along each dimension, `[N]`: every combination of those at which a block
    of the shard, or one of the whole, begins or ends. Between them the mapping is affine.
    """
    points = [end for _, _, own in held for end in own.ends]
    for part, hf, own in held:
        for other, whole_hf, _ in whole:
            if other == part and hf.ends[0] <= whole_hf.ends[1] and whole_hf.ends[0] <= hf.ends[1]:
                ends = np.array(whole_hf.ends, dtype=np.int64)
                inside, index = hf.find(ends)
                points += own.flat(index)[inside].tolist()
    flat = np.array([*points, 0], dtype=np.int64)
    along = [
        np.unique(flat // step % size) for step, size in zip(strides(local), local, strict=True)
    ]
    return [axis.ravel() for axis in np.meshgrid(*along, indexing="ij")]


def _runs(indices: Indices) -> Iterator[Span]:
    """Consecutive indices, int64 `[N]`, as spans; those below 0 are in none."""
    if not len(indices):
        return
    new = (indices[1:] != indices[:-1] + 1) | (indices[:-1] < 0)
    starts = [0, *(np.flatnonzero(new) + 1).tolist(), len(indices)]
    for first, end in pairwise(starts):
        if (index := int(indices[first])) >= 0:
            yield Span(first, index, end - first)
