"""Finds and encodes which elements of a run have changed, and to what.

Pure. Elements are compared and sent as bits: -0.0 differs from 0.0, a NaN from another NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bits = npt.NDArray[np.unsignedinteger]
"""Elements as unsigned integers of their size, `[N]`."""

Positions = npt.NDArray[np.int64]
"""Indices of elements of a run, ascending, `[N]`."""

WHOLE, BITMAP, GAPS = "whole", "bitmap", "gaps"
"""Encodings: the values of all elements; those of the changed ones, and then either a bit for each
element, from the lowest of each byte on, or the number of unchanged ones before each in groups of 7
bits, lowest first, of which all but the last have the highest bit set.
"""

_LONGEST = 5  # bytes of a gap: 2**35 elements
_UNSIGNED: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = np.dtype(np.uint64)


class Change(NamedTuple):
    """Which elements of a run have changed, and their new values."""

    positions: Positions
    values: Bits


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


def find_changes(now: Bits, before: Bits) -> Positions:
    """Where two runs of one length differ.

    A search for set flags takes a few cycles for each flag. So 64 bytes are looked at together,
    then the words of those that differ, then the elements of those words.
    """
    in_word = _WORD.itemsize // now.itemsize
    shift = in_word.bit_length() - 1  # a division takes as long as all else
    body = len(now) >> (shift + 3) << (shift + 3)
    words, others = now[:body].view(_WORD), before[:body].view(_WORD)
    flags = (words != others).view(_WORD)
    lines = np.flatnonzero(flags != 0)
    at = np.flatnonzero(flags.take(lines).view(np.bool_))
    found = (lines.take(at >> 3) << 3) + (at & 7)
    at = np.flatnonzero(words.take(found).view(now.dtype) != others.take(found).view(now.dtype))
    inside = (found.take(at >> shift) << shift) + (at & (in_word - 1))
    rest = np.flatnonzero(now[body:] != before[body:])
    return np.concatenate((inside, rest + body)) if len(rest) else inside


def encode(change: Change, before: Bits) -> Encoded:
    """The smallest encoding of a change of the run `before`; `decode` is its inverse."""
    positions, values = change
    count, elements = len(positions), len(before)
    index = _pack_gaps(positions)
    encoding, bitmap_bytes = GAPS, -(-elements // 8)
    if bitmap_bytes < len(index):
        encoding, flags = BITMAP, np.zeros(elements, np.uint8)
        flags[positions] = 1
        index = np.packbits(flags, bitorder="little")
    if (elements - count) * before.itemsize <= len(index):
        whole = before.copy()
        whole[positions] = values
        return Encoded(WHOLE, elements, whole.tobytes())
    return Encoded(encoding, count, values.tobytes() + index.tobytes())


def decode(encoded: Encoded, elements: int, itemsize: int) -> Change:
    """The change of a run of so many elements; of `WHOLE`, all of them. ValueError for bytes that
    `encode` does not make.
    """
    encoding, count, content = encoded
    if not 0 <= count <= elements or len(content) < count * itemsize:
        raise ValueError(f"{len(content)} bytes are not {count} changes of {elements} elements")
    values = np.frombuffer(content, np.dtype(_UNSIGNED[itemsize]), count)
    index = np.frombuffer(content, np.uint8, offset=count * itemsize)
    if encoding == WHOLE:
        if count != elements or len(index):
            raise ValueError("not all elements are there")
        positions = np.arange(elements)
    elif encoding == BITMAP:
        if len(index) != -(-elements // 8):
            raise ValueError(f"its bitmap has {len(index)} bytes for {elements} elements")
        positions = np.flatnonzero(np.unpackbits(index, bitorder="little"))
    elif encoding == GAPS:
        positions = _unpack_gaps(index)
    else:
        raise ValueError(f"its encoding {encoding!r:.40} is unknown")
    if len(positions) != count or (count and positions[-1] >= elements):
        raise ValueError(f"its positions are not {count} of {elements} elements")
    return Change(positions, values)


def _pack_gaps(positions: Positions) -> npt.NDArray[np.uint8]:
    gaps = np.diff(positions, prepend=-1) - 1
    longest = max(1, -(-int(gaps.max(initial=0)).bit_length() // 7))
    if longest == 1:
        return gaps.astype(np.uint8)
    lengths = np.ones(len(gaps), np.int64)
    for index in range(1, longest):
        lengths += gaps >= 1 << 7 * index
    ends = np.cumsum(lengths)
    starts, packed = ends - lengths, np.empty(int(ends[-1]), np.uint8)
    for index in range(longest):
        if index:
            kept = np.flatnonzero(lengths > index)
            gaps, lengths, starts = gaps[kept], lengths[kept], starts[kept]
        more = (lengths > index + 1).astype(np.uint8) << 7
        packed[starts + index] = (gaps >> 7 * index).astype(np.uint8) & 0x7F | more
    return packed


def _unpack_gaps(packed: npt.NDArray[np.uint8]) -> Positions:
    ends = np.flatnonzero(packed < 0x80)
    if len(packed) and (not len(ends) or ends[-1] != len(packed) - 1):
        raise ValueError("its last gap does not end")
    lengths = np.diff(ends, prepend=-1)
    if (lengths > _LONGEST).any() or (packed[ends[lengths > 1]] == 0).any():
        raise ValueError("it has gaps of too many bytes")
    starts = ends - lengths + 1
    gaps = (packed[starts] & 0x7F).astype(np.int64)
    for index in range(1, int(lengths.max(initial=0))):
        at = np.flatnonzero(lengths > index)
        gaps[at] |= (packed[starts[at] + index] & 0x7F).astype(np.int64) << 7 * index
    return np.cumsum(gaps + 1) - 1
