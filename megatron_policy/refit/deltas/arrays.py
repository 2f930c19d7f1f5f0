"""What is computed of every element of a run, with whole arrays: `compiled.py` does the same, and
gives the same, in loops.

The *sum* of a run stands for its content. It is the sum, modulo 2**64, over its words of 64 bits
(the last one filled up with zeros) of mixed word * key of its place. To mix a word, its upper half
is added to it: the sum is that of each half times an odd number of its own, so that one element
that is another one always changes it, and several do but for one chance in 2**32 or less. A key is
the product of two odd pseudo-random numbers, of the place in a block of words and of the block:
arrays multiply a block by one table. What an element adds does not depend on others, so that
what changes add to a sum follows from the former and the present elements.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger]
"""Elements as unsigned integers of their size, `[N]`."""

Positions = npt.NDArray[np.int64]
"""Indices of elements of a run, ascending, `[N]`."""

WORDS = 15
"""A block has 2**15 words."""
FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
"""Odd constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom generators)."""
MOST = np.iinfo(np.uint8).max
"""The number of a short gap that says that so many are unchanged and that more follow."""

_STEP = 1 << 20  # bytes that are compared at a time: they stay in the cache
_MASK = (1 << 64) - 1
_WORD, _HALF = np.dtype(np.uint64), np.uint64(32)


def take_changes(now: Bits, kept: Bits, first: int, last: int) -> tuple[Bits, Bits, int, int]:
    """The elements `now` that differ from `kept`, which has them afterwards; in a byte each, or
    several, how many are unchanged before each; where the last one is; by how much the sum of
    `kept` has grown. The runs are part of a longer one, from `first` on, in which `last` is the
    last changed element before them.
    """
    step = _STEP // now.itemsize
    found = [
        (begin, *_take(now[begin : begin + step], kept[begin : begin + step]))
        for begin in range(0, len(now), step)
    ]
    if not found:
        return now, np.zeros(0, np.uint8), last, 0
    positions = np.concatenate([places + (begin + first) for begin, places, *_ in found])
    values, before = (np.concatenate([each[part] for each in found]) for part in (2, 3))
    gaps = pack_gaps(positions, np.dtype(np.uint8), last)
    last = int(positions[-1]) if len(positions) else last
    grown = _sum_terms(values, positions) - _sum_terms(before, positions)
    return values, gaps, last, grown & _MASK


def sum_elements(run: Bits) -> int:
    """The sum of a run."""
    body = run.nbytes // _WORD.itemsize * _WORD.itemsize // run.itemsize
    words, total = run[:body].view(_WORD), 0
    size = 1 << WORDS
    keys, of_blocks = _keys_of_words(), _keys(size, len(words) // size + 1)
    for block, key in enumerate(of_blocks.tolist()):
        own = words[block * size : (block + 1) * size]
        total += int(np.dot(_mix(own), keys[: len(own)])) * key
    return (total + _sum_terms(run[body:], np.arange(body, len(run)))) & _MASK


def pack_gaps(positions: Positions, kind: np.dtype[np.unsignedinteger], last: int = -1) -> Bits:
    """How many are unchanged before each, after `last`, in numbers of that kind, of which the
    largest says that so many are and that more follow.
    """
    most = np.iinfo(kind).max
    gaps = np.diff(positions, prepend=last) - 1
    skips = gaps // most
    ends = np.arange(len(gaps)) + np.cumsum(skips)
    packed: Bits = np.full(int(ends[-1]) + 1 if len(ends) else 0, most, kind)
    packed[ends] = gaps - most * skips
    return packed


def _take(now: Bits, kept: Bits) -> tuple[Positions, Bits, Bits]:
    """Where two runs of one length differ, and their elements there, `now` and before.

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
    values, before = new.view(now.dtype), old.view(now.dtype)
    at = np.flatnonzero(values != before)
    positions = (found.take(at >> shift) << shift) + (at & (in_word - 1))
    values, before = values.take(at), before.take(at)
    rest = np.flatnonzero(now[body:] != kept[body:]) + body
    if not len(rest):
        return positions, values, before
    last, former = now.take(rest), kept.take(rest)
    kept[rest] = last
    return (
        np.concatenate((positions, rest)),
        np.concatenate((values, last)),
        np.concatenate((before, former)),
    )


def _sum_terms(bits: Bits, positions: Positions) -> int:
    """What these elements add to the sum of a run in which they are at those positions."""
    if not len(bits):
        return 0
    in_bytes = positions * bits.itemsize
    own = bits.astype(_WORD) << ((in_bytes & 7) << 3).view(_WORD)
    words, size = in_bytes >> 3, 1 << WORDS
    blocks = words >> WORDS
    first, last = int(blocks[0]), int(blocks[-1])
    keys = _keys(size + first, last - first + 1).take(blocks - first)
    keys *= _keys_of_words().take(words & (size - 1))
    return int(np.dot(_mix(own), keys))


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = words >> _HALF
    mixed += words
    return mixed


@cache
def _keys_of_words() -> npt.NDArray[np.uint64]:
    return _keys(0, 1 << WORDS)


def _keys(first: int, count: int) -> npt.NDArray[np.uint64]:
    """Odd pseudo-random numbers of so many places from `first` on."""
    keys = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(FIRST)
    keys ^= keys >> _HALF
    keys *= np.uint64(SECOND)
    return keys | np.uint64(1)
