"""What is computed of every element of a run, with whole arrays: `compiled.py` does the same, and
gives the same, in loops.

The *sum* of a run stands for its content. It is the sum, modulo 2**64, of a number for each of its
words of 64 bits: its bytes, one to eight zeros that fill up a word, and then the count of its bytes
as one more word. With K the odd pseudo-random number of a word's place, the word w becomes

    u = w * K;  u ^= u >> 48;  u = (u + 1) * K;  u ^= u >> 32

which has an inverse. So another value of one word always changes the sum. Changes of several words
cancel with a chance of about one in 2**64, as if each number were drawn: the multiplications spread
low bits upwards, and the shifts bring high ones down between them, so that what a change adds
depends on all bits of the word and of K. That holds also for signs, for negated tensors and for
words that change places. It is measured, not proved, and is no protection against someone who
searches for two runs with one sum.

What a word adds does not depend on others, so that what changes add to a sum follows from the
former and the present words.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from megatron_policy.refit.digest import FIRST, SECOND

Bits = npt.NDArray[np.unsignedinteger]
"""Elements as unsigned integers of their size, `[N]`."""

Words = npt.NDArray[np.uint64]
"""Words of 64 bits, `[N]`."""

Positions = npt.NDArray[np.int64]
"""Indices of elements of a run, ascending, `[N]`."""

MOST = np.iinfo(np.uint8).max
"""The number of a short gap that says that so many are unchanged and that more follow."""

_STEP = 1 << 20  # bytes that are compared at a time: they stay in the cache
_WORDS = 1 << 15  # words that are summed at a time
_MASK = (1 << 64) - 1
_WORD, _ONE = np.dtype(np.uint64), np.uint64(1)
_HALF, _QUARTERS = np.uint64(32), np.uint64(48)


def pad_words(run: Bits) -> Words:
    """A copy of a run, as words of 64 bits, of which the last one is filled up with zeros."""
    words = np.zeros(-(-run.nbytes // _WORD.itemsize), _WORD)
    words.view(run.dtype)[: len(run)] = run
    return words


def take_changes(
    now: Bits, starts: Positions, length: int, kept: Bits, first: int, last: int, nan: int
) -> tuple[Bits, Bits, int, int]:
    """What of a run is other now, from `first` on; which the run then is too. `kept` is the run, as
    `pad_words` gives it; `now` has what follows one another there in pieces of that length, from
    `starts` on, in another dtype only if it is fp32 and the run bfloat16, of which `nan` is a NaN.

    Returns the new values; in a byte each, or several, how many are unchanged before each, after
    `last`; where the last one is; by how much the sum of the run has grown.
    """
    words, in_word, grown, begin = kept.view(_WORD), _WORD.itemsize // kept.itemsize, 0, 0
    all_positions, all_values = [np.zeros(0, np.int64)], [kept[:0]]
    for block in _gather(now, starts, length, kept.dtype):
        old = kept[first + begin : first + begin + len(block)]
        positions, values = _find(block, old)
        places = (positions + (first + begin)) // in_word
        places = places[np.diff(places, prepend=-1) > 0]
        before = words.take(places)
        old[positions] = values
        keys = _make_keys(places.astype(_WORD))
        grown += int(_mix(words.take(places), keys).sum()) - int(_mix(before, keys).sum())
        all_positions.append(positions + (first + begin))
        all_values.append(values)
        begin += len(block)
    positions = np.concatenate(all_positions)
    gaps = pack_gaps(positions, np.dtype(np.uint8), last)
    last = int(positions[-1]) if len(positions) else last
    return np.concatenate(all_values), gaps, last, grown & _MASK


def sum_elements(run: Bits) -> int:
    """The sum of a run."""
    whole = run.nbytes // _WORD.itemsize
    words = run[: whole * _WORD.itemsize // run.itemsize].view(_WORD)
    rest = int.from_bytes(run[whole * _WORD.itemsize // run.itemsize :].tobytes(), "little")
    ends = np.array((rest, run.nbytes), _WORD)
    total = int(_mix(ends, _make_keys(np.arange(whole, whole + 2, dtype=_WORD))).sum())
    for first in range(0, whole, _WORDS):
        own = words[first : first + _WORDS]
        keys = _make_keys(np.arange(first, first + len(own), dtype=_WORD))
        total += int(_mix(own, keys).sum())
    return total & _MASK


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


def _gather(
    now: Bits, starts: Positions, length: int, dtype: np.dtype[np.unsignedinteger]
) -> Iterator[Bits]:
    """The pieces in blocks, one after another."""
    step = _STEP // dtype.itemsize
    together = max(1, step // max(1, length))
    for n in range(0, len(starts), together):
        for at in range(0, length, step):
            end = min(at + step, length)
            pieces = [now[start + at : start + end] for start in starts[n : n + together]]
            block = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            if block.dtype != dtype:
                rounded = torch.from_numpy(block.view(np.float32)).bfloat16()
                block = rounded.view(torch.uint16).numpy()
            yield block


def _find(now: Bits, kept: Bits) -> tuple[Positions, Bits]:
    """Where two runs of one length differ, and the elements `now` there.

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
    values = words.take(found).view(now.dtype)
    at = np.flatnonzero(values != others.take(found).view(now.dtype))
    positions = (found.take(at >> shift) << shift) + (at & (in_word - 1))
    rest = np.flatnonzero(now[body:] != kept[body:]) + body
    return np.concatenate((positions, rest)), np.concatenate((values.take(at), now.take(rest)))


def _mix(words: Words, keys: Words) -> Words:
    mixed = words * keys
    mixed ^= mixed >> _QUARTERS
    mixed += _ONE
    mixed *= keys
    mixed ^= mixed >> _HALF
    return mixed


def _make_keys(places: Words) -> Words:
    """Odd pseudo-random numbers of these places, in their memory."""
    places += _ONE
    places *= np.uint64(FIRST)
    places ^= places >> _HALF
    places *= np.uint64(SECOND)
    places |= _ONE
    return places
