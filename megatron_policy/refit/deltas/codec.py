"""Finds and encodes which elements of a run have changed, and to what.

Pure. Elements are compared and sent as bits: -0.0 differs from 0.0, a NaN from another NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_policy.refit.deltas import arrays
from megatron_policy.refit.deltas.arrays import Bits, Positions, Words, pack_gaps

WHOLE, BITMAP, GAPS, WIDE_GAPS = "whole", "bitmap", "short gaps", "wide gaps"
"""Encodings: the values of all elements; those of the changed ones, and then either a bit for each
element, from the lowest of each byte on, or the number of unchanged ones before each, in a byte or
in two (lowest first). The largest number says that so many are unchanged and that more follow.
"""

SUMS = 1 << 64
"""How many sums there are: they are added up modulo this number."""

_PART = 1 << 19  # positions that are found at a time

_NUMBERS: dict[str, np.dtype[Any]] = {GAPS: np.dtype(np.uint8), WIDE_GAPS: np.dtype("<u2")}
_UNSIGNED: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Change(NamedTuple):
    """Which elements of a run have changed, and their new values."""

    positions: Positions
    values: Bits


class Taken(NamedTuple):
    """What has been taken of a run: new values, short gaps, the place of the last one, and by how
    much the sum of the run has grown, modulo 2**64.
    """

    values: Bits
    gaps: Bits
    last: int
    grown: int


class Pieces(NamedTuple):
    """Parts of a run, all of the same length: where each begins."""

    starts: Positions
    length: int


class Encoded(NamedTuple):
    """A change as bytes: the encoding, the number of changed elements, and the content."""

    encoding: str
    changes: int
    content: bytes


def view_bits(tensor: Tensor) -> Bits:
    """The elements of a contiguous tensor in host memory, in the same memory."""
    size = tensor.dtype.itemsize
    flat = tensor.detach().reshape(-1).view(_SIGNED[size]).numpy()
    return flat.view(_UNSIGNED[size])


def take_changes(
    now: Bits,
    words: Words,
    first: int = 0,
    last: int = -1,
    *,
    pieces: Pieces | None = None,
    rounded: bool = False,
) -> Taken:
    """What of a run, from `first` on, is other `now`, which the run then is too; of `now` these
    pieces, one after another, and of fp32 what they are as bfloat16 if they are `rounded`. The run
    is given as `pad_words` gives it; its last changed element before is at `last`.
    """
    starts, length = pieces or Pieces(np.zeros(1, np.int64), len(now))
    kept = words.view(np.uint16 if rounded else now.dtype)
    return Taken(*_loops().take_changes(now, starts, length, kept, first, last, _make_nan()))


def sum_elements(run: Bits) -> int:
    """The sum of a run, which stands for its content; `arrays.py` says what it is."""
    return int(_loops().sum_elements(run))


def encode(values: Bits, gaps: Bits, run: Bits) -> Encoded:
    """The smallest encoding of what has been taken of a `run`, which is as it is now; `decode` is
    its inverse.
    """
    count, elements = len(values), len(run)
    bitmap = -(-elements // 8)
    if (elements - count) * run.itemsize <= min(gaps.nbytes, bitmap):
        return Encoded(WHOLE, elements, run.tobytes())
    encoding, index = GAPS, gaps
    if gaps.nbytes > 2 * count:
        positions = np.concatenate([*_unpack_gaps(gaps)])
        encoding, index = WIDE_GAPS, pack_gaps(positions, _NUMBERS[WIDE_GAPS])
    if bitmap < index.nbytes:
        encoding, flags = BITMAP, np.zeros(elements, np.uint8)
        for positions in _unpack_gaps(gaps):
            flags[positions] = 1
        index = np.packbits(flags, bitorder="little")
    return Encoded(encoding, count, b"".join((values.data, index.data)))


def expect_bytes(changed: float, itemsize: int) -> float:
    """The bytes that `encode` makes for each element of a long run, on average, of which this share
    has changed in random places, above 0.
    """

    def count_gaps(kind: np.dtype[Any]) -> float:
        most = np.iinfo(kind).max
        longer = (1.0 - changed) ** most  # the share of gaps that go on after a largest number
        return changed * (itemsize + kind.itemsize / (1.0 - longer))

    whole, bitmap = float(itemsize), changed * itemsize + 1 / 8
    return min(whole, bitmap, *map(count_gaps, _NUMBERS.values()))


def decode(encoded: Encoded, elements: int, itemsize: int) -> Iterator[Change]:
    """The change of a run of so many elements, of `WHOLE` all of them, in parts that follow one
    another: positions take several times the bytes of elements. ValueError, after parts that are
    of no use then, for bytes that `encode` does not make.
    """
    encoding, count, content = encoded
    if not 0 <= count <= elements or len(content) < count * itemsize:
        raise ValueError(f"{len(content)} bytes are not {count} changes of {elements} elements")
    values = np.frombuffer(content, np.dtype(_UNSIGNED[itemsize]), count)
    index = np.frombuffer(
        content, _NUMBERS.get(encoding, np.dtype(np.uint8)), offset=count * itemsize
    )
    found: Iterator[Positions]
    if encoding == WHOLE:
        if count != elements or len(index):
            raise ValueError("not all elements are there")
        found = (np.arange(at, min(at + _PART, count)) for at in range(0, count, _PART))
    elif encoding == BITMAP:
        if len(index) != -(-elements // 8):
            raise ValueError(f"its bitmap has {len(index)} bytes for {elements} elements")
        found = (
            np.flatnonzero(np.unpackbits(index[at : at + _PART // 8], bitorder="little")) + 8 * at
            for at in range(0, len(index), _PART // 8)
        )
    elif encoding in _NUMBERS:
        found = _unpack_gaps(index)
    else:
        raise ValueError(f"its encoding {encoding!r:.40} is unknown")
    first = 0
    for positions in found:
        last = first + len(positions)
        if last > count or (len(positions) and positions[-1] >= elements):
            break
        yield Change(positions, values[first:last])
        first = last
    else:
        if first == count:
            return
    raise ValueError(f"its positions are not {count} of {elements} elements")


def _unpack_gaps(packed: Bits) -> Iterator[Positions]:
    """The positions, in parts."""
    most, last = np.iinfo(packed.dtype).max, -1
    if len(packed) and packed[-1] == most:
        raise ValueError("its last gap does not end")
    for at in range(0, len(packed), _PART):
        part = packed[at : at + _PART]
        is_end = part < most
        steps = (part.astype(np.int64) + is_end).cumsum()
        steps += last
        last = int(steps[-1])
        yield steps[is_end]


@cache
def _loops() -> Any:
    """The faster of two modules that compute the same, if what it needs is here."""
    try:
        from megatron_policy.refit.deltas import compiled
    except (ImportError, RuntimeError):  # no Numba; or nowhere to keep what it compiles
        return arrays
    return compiled


@cache
def _make_nan() -> np.uint16:
    """What torch makes of a NaN as bfloat16, which depends on the machine."""
    return np.uint16(view_bits(torch.full((64,), torch.nan).bfloat16())[0])
