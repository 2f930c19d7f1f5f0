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

WHOLE, BITMAP, GAPS, WIDE_GAPS = "whole", "bitmap", "short gaps", "wide gaps"
"""Encodings: the values of all elements; those of the changed ones, and then either a bit for each
element, from the lowest of each byte on, or the number of unchanged ones before each, in a byte or
in two (lowest first). The largest number says that so many are unchanged and that more follow.
"""

_NUMBERS: dict[str, npt.DTypeLike] = {GAPS: np.uint8, WIDE_GAPS: np.dtype("<u2")}
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


def take_changes(now: Bits, kept: Bits) -> Change:
    """Where two runs of one length differ, and their elements `now`, which `kept` then has too.

    A search for set flags takes a few cycles for each flag. So 64 bytes are looked at together,
    then the words of those that differ, then the elements of those words.
    """
    in_word = _WORD.itemsize // now.itemsize
    shift = in_word.bit_length() - 1  # a division takes as long as all else
    body = len(now) >> (shift + 3) << (shift + 3)
    words, others = now[:body].view(_WORD), kept[:body].view(_WORD)
    flags = (words != others).view(_WORD)
    lines = np.flatnonzero(flags != 0)
    at = np.flatnonzero(flags.take(lines).view(np.bool_))
    found = (lines.take(at >> 3) << 3) + (at & 7)
    new, old = words.take(found), others.take(found)
    others[found] = new
    values = new.view(now.dtype)
    at = np.flatnonzero(values != old.view(now.dtype))
    inside = Change((found.take(at >> shift) << shift) + (at & (in_word - 1)), values.take(at))
    rest = np.flatnonzero(now[body:] != kept[body:])
    if not len(rest):
        return inside
    last = Change(rest + body, now[body:].take(rest))
    kept[last.positions] = last.values
    return Change(
        np.concatenate((inside.positions, last.positions)),
        np.concatenate((inside.values, last.values)),
    )


def encode(change: Change, before: Bits) -> Encoded:
    """The smallest encoding of a change of the run `before`; `decode` is its inverse."""
    positions, values = change
    count, elements = len(positions), len(before)
    encoding, index = GAPS, _pack_gaps(positions, GAPS)
    if index.nbytes > 2 * count:
        encoding, index = WIDE_GAPS, _pack_gaps(positions, WIDE_GAPS)
    if -(-elements // 8) < index.nbytes:
        encoding, flags = BITMAP, np.zeros(elements, np.uint8)
        flags[positions] = 1
        index = np.packbits(flags, bitorder="little")
    if (elements - count) * before.itemsize <= index.nbytes:
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
    index = np.frombuffer(content, _NUMBERS.get(encoding, np.uint8), offset=count * itemsize)
    if encoding == WHOLE:
        if count != elements or len(index):
            raise ValueError("not all elements are there")
        positions = np.arange(elements)
    elif encoding == BITMAP:
        if len(index) != -(-elements // 8):
            raise ValueError(f"its bitmap has {len(index)} bytes for {elements} elements")
        positions = np.flatnonzero(np.unpackbits(index, bitorder="little"))
    elif encoding in _NUMBERS:
        positions = _unpack_gaps(index)
    else:
        raise ValueError(f"its encoding {encoding!r:.40} is unknown")
    if len(positions) != count or (count and positions[-1] >= elements):
        raise ValueError(f"its positions are not {count} of {elements} elements")
    return Change(positions, values)


def _pack_gaps(positions: Positions, encoding: str) -> Bits:
    kind = np.dtype(_NUMBERS[encoding])
    most = np.iinfo(kind).max
    gaps = np.diff(positions, prepend=-1) - 1
    skips = gaps // most
    ends = np.arange(len(gaps)) + np.cumsum(skips)
    packed: Bits = np.full(int(ends[-1]) + 1 if len(ends) else 0, most, kind)
    packed[ends] = gaps - most * skips
    return packed


def _unpack_gaps(packed: Bits) -> Positions:
    is_end = packed < np.iinfo(packed.dtype).max
    if len(packed) and not is_end[-1]:
        raise ValueError("its last gap does not end")
    steps = packed.astype(np.int64) + is_end
    return steps.cumsum()[is_end] - 1
