"""What `arrays.py` computes, in loops that numba compiles: each element is read once.

Compiling takes seconds, once for each size of elements; the result is kept on the disk.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64
from numba.cpython.unsafe.numbers import trailing_zeros

from megatron_policy.refit.deltas import arrays
from megatron_policy.refit.digest import FIRST, SECOND

_BLOCK = 1 << 17  # elements at a time: what is compared is still in the cache when it is copied
_NONE, _ONE, _THREE, _SEVEN = uint64(0), uint64(1), uint64(3), uint64(7)
_HALF, _QUARTERS = uint64(32), uint64(48)
_FIRST, _SECOND, _MOST = uint64(FIRST), uint64(SECOND), uint64(arrays.MOST)


@njit(nogil=True, cache=True)
def take_changes(now, words, first, last):
    """See `arrays.take_changes`."""
    kept, size = words.view(now.dtype), uint64(now.itemsize)
    places, values = np.empty(_BLOCK + 2, np.uint32), np.empty(len(now), now.dtype)
    before, after = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    gaps = np.empty(len(now) + (first + len(now) - last) // 255 + 2, np.uint8)
    steps, former = np.empty(_BLOCK, np.uint64), uint64(last)
    count, packed, grown = 0, _NONE, _NONE
    for begin in range(0, len(now), _BLOCK):
        new, start = now[begin : begin + _BLOCK], first + begin
        old = kept[start : start + len(new)]
        found = _find(new, old, places)
        for at in range(found):  # several in a word change it one after another
            in_bytes = (uint64(start) + uint64(places[at])) * size
            value, word = new[places[at]], words[in_bytes >> _THREE]
            before[at] = word
            word ^= uint64(value ^ old[places[at]]) << ((in_bytes & _SEVEN) << _THREE)
            values[count + at], after[at], words[in_bytes >> _THREE] = value, word, word
        for at in range(found):
            key = _key((uint64(start) + uint64(places[at])) * size >> _THREE)
            grown += _mix(after[at], key) - _mix(before[at], key)
        for at in range(found):
            position = uint64(start) + uint64(places[at])
            steps[at], former = position - former - _ONE, position
        for at in range(found):
            gap, is_long = steps[at], uint64(steps[at] >= _MOST)
            gaps[packed] = _MOST  # which is replaced unless the gap is long
            packed += is_long
            gap -= is_long * _MOST
            while gap >= _MOST:
                gaps[packed] = _MOST
                packed += _ONE
                gap -= _MOST
            gaps[packed] = gap
            packed += _ONE
        count += found
    return values[:count].copy(), gaps[:packed].copy(), np.int64(former), grown


@njit(nogil=True, cache=True)
def sum_elements(run):
    """See `arrays.sum_elements`."""
    whole = len(run) * run.itemsize // 8
    body, total, rest = whole * 8 // run.itemsize, _NONE, _NONE
    words, end = run[:body].view(np.uint64), uint64(whole)
    for at in range(whole):
        total += _mix(words[at], _key(uint64(at)))
    for at in range(body, len(run)):
        rest |= uint64(run[at]) << uint64((at - body) * run.itemsize * 8)
    total += _mix(rest, _key(end))
    return total + _mix(uint64(len(run) * run.itemsize), _key(end + _ONE))


@njit(nogil=True, cache=True)
def _find(now, kept, places):
    """Where they differ, in order. A branch for each flag would be guessed wrong each time."""
    found, body = _NONE, len(now) // 64 * 64
    for first in range(0, body, 64):
        flags = _NONE
        for bit in range(64):
            flags |= uint64(now[first + bit] != kept[first + bit]) << uint64(bit)
        for _ in range(2):  # more are rare
            places[found] = first + trailing_zeros(flags)
            found += uint64(flags != _NONE)
            flags &= flags - _ONE
        while flags:
            places[found] = first + trailing_zeros(flags)
            found += _ONE
            flags &= flags - _ONE
    for place in range(body, len(now)):
        places[found] = place
        found += uint64(now[place] != kept[place])
    return np.int64(found)


@njit(inline="always")
def _mix(word, key):
    mixed = word * key
    mixed = ((mixed ^ (mixed >> _QUARTERS)) + _ONE) * key
    return mixed ^ (mixed >> _HALF)


@njit(inline="always")
def _key(place):
    key = (place + _ONE) * _FIRST
    return ((key ^ (key >> _HALF)) * _SECOND) | _ONE
