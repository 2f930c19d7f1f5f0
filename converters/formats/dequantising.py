"""Quantised tensors as bfloat16: which bytes hold a slice of one, and what they stand for.

A weight is stored as two matrices of bytes, the payload (fp8, or two fp4 numbers per byte) and the
scales, one for each block of the weight. Opens no files.

M, K: rows and columns of the payload in elements. E, N: experts and rows of each, M = E N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_policy.converters.config_fields.quantisation import FP8, Scheme
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.converters.rows.regions import Indices, bounds, boxes

CHUNK = 2**18
"""Elements that are dequantised at a time: it bounds the temporary memory, and fits a cache."""
TEMPORARY = 8
"""Bytes of temporary memory per element of a chunk, at most."""

# The numbers of fp4 (e2m1: a sign, two bits of exponent, one of fraction) by their four bits.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


@dataclass(frozen=True)
class ByteMatrix:
    """Where a stored matrix lies: `rows` of `width` bytes each, in a file from byte `start` on."""

    name: str
    path: Path
    start: int
    rows: int
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.rows * self.width


class Fetch(Protocol):
    """Gives bytes of stored matrices."""

    def __call__(self, matrix: ByteMatrix, rows: range, columns: range, /) -> Tensor:
        """These bytes as uint8 `[rows, columns]`; `columns` has step 1."""


@dataclass(frozen=True)
class QuantisedTensor:
    """A weight that is stored quantised and reads as a bfloat16 tensor of `shape`.

    fp8: `[M, K]`, as stored. mxfp4: `[E, K, N]`, where the payload is `[E, N, K]`.
    """

    shape: Shape
    scheme: Scheme
    payload: ByteMatrix
    scales: ByteMatrix

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its files."""
        return self.payload.nbytes + self.scales.nbytes

    def take(self, view: Shape, index: tuple[slice, ...], fetch: Fetch) -> Tensor:
        """The elements of `tensor.view(view)[index]`, as bfloat16 in new memory.

        Reads no others, unless a dimension of the view spans parts of two of the tensor.
        """
        picks = picked(self.shape, view, index)
        if picks is None:
            whole = self._empty(self.shape)
            self.fill([[range(size)] for size in self.shape], whole, fetch)
            return whole.contiguous().view(view)[index]
        out = self._empty(_lengths(picks))
        self.fill(picks, out, fetch)
        # Splitting dimensions keeps a view of the transposed memory of mxfp4.
        return out.reshape([count for _, _, count in bounds(view, index)])

    def copy_to(self, out: Tensor, view: Shape, index: tuple[slice, ...], fetch: Fetch) -> None:
        """Copy the elements of `tensor.view(view)[index]` to `out`, of their shape, rounded to
        bfloat16. Needs no memory of their size, except where the rows of `out` are scattered.
        """
        picks = picked(self.shape, view, index)
        flat = None if picks is None else _viewed(out, _lengths(picks))
        if picks is None or flat is None:
            out.copy_(self.take(view, index, fetch))
        else:
            self.fill(picks, flat, fetch)

    def read(self, first: int, values: Tensor, fetch: Fetch) -> None:
        """Fill flat bfloat16 `values` with that many elements from element `first` on."""
        at = 0
        for box in boxes(self.shape, first, first + values.numel()):
            sizes = tuple(end - begin for begin, end in box)
            part = values[at : at + math.prod(sizes)].view(sizes)
            self.fill([[range(begin, end)] for begin, end in box], part, fetch)
            at += part.numel()

    def fill(self, picks: Sequence[Sequence[range]], out: Tensor, fetch: Fetch) -> None:
        """Fill `out` with the elements at `picks`: for each dimension, ranges one after another."""
        if self.scheme.method == FP8:
            rows, columns = picks
            self._fill_matrix(rows, columns, out, fetch)
            return
        experts, columns, rows = picks
        height = self.shape[-1]
        for place, expert in enumerate(number for each in experts for number in each):
            own = [range(expert * height + r.start, expert * height + r.stop, r.step) for r in rows]
            self._fill_matrix(own, columns, out[place].mT, fetch)

    def _empty(self, shape: Shape) -> Tensor:
        """Memory for the result, in the order of the payload."""
        if self.scheme.method == FP8:
            return torch.empty(shape, dtype=torch.bfloat16)
        return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=torch.bfloat16).mT

    def _fill_matrix(
        self, rows: Sequence[range], columns: Sequence[range], out: Tensor, fetch: Fetch
    ) -> None:
        """The rows and columns of the payload's matrix, into `out` `[rows, columns]`."""
        for (row, mine), (column, place) in product(_placed(rows), _placed(columns)):
            if row and column:
                self._fill_range(row, column, out[mine, place], fetch)

    def _fill_range(self, rows: range, columns: range, out: Tensor, fetch: Fetch) -> None:
        height, width = self.scheme.block
        span = range(columns[0], columns[-1] + 1)
        tall = range(rows[0] // height, rows[-1] // height + 1) if height > 1 else rows
        scales = self._scales(tall, range(span.start // width, span[-1] // width + 1), fetch)
        blocks = torch.arange(rows.start, rows.stop, rows.step) // height
        blocks = (blocks - tall.start) // tall.step
        step = max(1, CHUNK // len(span))
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            values = self._decode(part, span, fetch)
            _multiply(values, span, scales.index_select(0, blocks[at : at + step]), width)
            # Two steps where `out` is wider: a weight has the precision of bfloat16.
            narrow = values.dtype if out.dtype == torch.bfloat16 else torch.bfloat16
            out[at : at + step].copy_(values[:, :: columns.step].to(narrow))

    def _scales(self, rows: range, columns: range, fetch: Fetch) -> Tensor:
        """Factors `[rows, columns]` of blocks: float32 for fp8, bfloat16 for mxfp4."""
        if self.scheme.method != FP8:
            raw = fetch(self.scales, rows, columns)
            return _looked_up(_powers_of_two(), raw)
        dtype = self.scales.dtype
        inside = range(columns.start * dtype.itemsize, columns.stop * dtype.itemsize)
        # A matrix need not start at a multiple of its dtype's size, and a view of one would.
        raw = fetch(self.scales, rows, inside).clone(memory_format=torch.contiguous_format)
        return raw.view(dtype).float()

    def _decode(self, rows: range, span: range, fetch: Fetch) -> Tensor:
        """The payload's numbers `[rows, span]`: float32 for fp8, bfloat16 for mxfp4."""
        if self.scheme.method == FP8:
            return _looked_up(_fp8_numbers(), fetch(self.payload, rows, span))
        raw = fetch(self.payload, rows, range(span.start // 2, (span.stop + 1) // 2))
        pairs = _looked_up(_fp4_pairs(), raw).view(torch.bfloat16)
        return pairs[:, span.start % 2 :][:, : len(span)]


def picked(shape: Shape, view: Shape, index: tuple[slice, ...]) -> list[list[range]] | None:
    """For each dimension of `shape`, the indices that `view` and `index` take, in order.

    None if the view does not just split dimensions.
    """
    full = [*index, *(slice(None),) * (len(view) - len(index))]
    left = list(zip(view, full, strict=True))
    found: list[list[range]] = []
    for size in shape:
        group: list[tuple[int, slice]] = []
        while left and math.prod(n for n, _ in group) < size:
            group.append(left.pop(0))
        if math.prod(n for n, _ in group) != size:
            return None
        if len(group) == 1:
            found.append([range(*group[0][1].indices(size))])
            continue
        numbers = np.arange(size).reshape([n for n, _ in group])[tuple(i for _, i in group)]
        found.append(_as_ranges(numbers.reshape(-1)))
    # What is left are dimensions of size 1.
    return found if all(len(range(*i.indices(n))) == n == 1 for n, i in left) else None


def _lengths(picks: Sequence[Sequence[range]]) -> Shape:
    """How many indices there are for each dimension."""
    return tuple(sum(map(len, ranges)) for ranges in picks)


def _viewed(tensor: Tensor, shape: Shape) -> Tensor | None:
    """The tensor in another shape; None if that needs a copy."""
    try:
        return tensor.view(shape)
    except RuntimeError:
        return None


def _as_ranges(numbers: Indices) -> list[range]:
    """Ascending numbers as the fewest ranges of one step."""
    steps = np.diff(numbers)
    if not len(steps) or (steps == steps[0]).all():
        step = int(steps[0]) if len(steps) else 1
        return [range(int(numbers[0]), int(numbers[-1]) + 1, step)] if len(numbers) else []
    cuts = [0, *(int(at) + 1 for at in np.flatnonzero(steps != 1)), len(numbers)]
    return [range(int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in pairwise(cuts)]


def _placed(ranges: Sequence[range]) -> Iterator[tuple[range, slice]]:
    """Each range with the place of its elements among those of all."""
    ends = list(accumulate(map(len, ranges)))
    for each, end in zip(ranges, ends, strict=True):
        yield each, slice(end - len(each), end)


def _multiply(values: Tensor, span: range, scales: Tensor, width: int) -> None:
    """Multiply the columns `span` of a matrix, in place, by the scales of their blocks.

    `values` `[rows, span]`; `scales` `[rows, blocks]`, from the block of the first column on. The
    first and the last block can be cut.
    """
    first = span.start // width
    head = min(span.stop, -(-span.start // width) * width)
    tail = max(head, span.stop // width * width)
    for begin, end in ((span.start, head), (head, tail), (tail, span.stop)):
        if begin == end:
            continue
        each = min(width, end - begin)
        blocks = scales[:, begin // width - first : -(-end // width) - first]
        part = values[:, begin - span.start : end - span.start]
        part.unflatten(1, (-1, each)).mul_(blocks.unsqueeze(-1))


def _looked_up(table: Tensor, raw: Tensor) -> Tensor:
    """`table` at every byte of `raw` `[rows, columns]`: several times faster than torch's cast."""
    index = raw.to(torch.int32, memory_format=torch.contiguous_format).view(-1)
    return torch.index_select(table, 0, index).view(raw.shape)


@cache
def _fp8_numbers() -> Tensor:
    """The float32 numbers of all bytes of fp8 (e4m3) `[256]`."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@cache
def _fp4_pairs() -> Tensor:
    """For all bytes `[256]` their two fp4 numbers, the low bits first: two bfloat16 in an int32."""
    numbers = torch.tensor([*_FP4, *(-number for number in _FP4)], dtype=torch.bfloat16)
    every = torch.arange(256)
    return torch.stack([numbers[every % 16], numbers[every // 16]], dim=1).view(torch.int32)[:, 0]


@cache
def _powers_of_two() -> Tensor:
    """The bfloat16 scales of all bytes of e8m0, which is an exponent alone `[256]`."""
    exponents = torch.arange(256, dtype=torch.float64) - _E8M0_BIAS
    return torch.exp2(exponents).to(torch.bfloat16)
