"""What `arrays.py` computes, in loops that numba compiles: each element is read once.

Compiling takes seconds, once for each size of elements; the result is kept on the disk.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64
from numba.cpython.unsafe.numbers import trailing_zeros

from megatron_policy.refit.deltas import arrays

_BLOCK = 1 << 17  # elements at a time: what is compared is still in the cache when it is copied
_NONE, _ONE, _THREE, _SEVEN, _HALF = uint64(0), uint64(1), uint64(3), uint64(7), uint64(32)
_WORDS, _SIZE = uint64(arrays.WORDS), uint64(1 << arrays.WORDS)
_FIRST, _SECOND, _MOST = uint64(arrays.FIRST), uint64(arrays.SECOND), uint64(arrays.MOST)


@njit(nogil=True, cache=True)
def take_changes(now, kept, first, last):
    """See `arrays.take_changes`."""
    places, before = np.empty(_BLOCK + 2, np.uint32), np.empty(_BLOCK, now.dtype)
    values = np.empty(len(now), now.dtype)
    gaps = np.empty(len(now) + (first + len(now) - last) // 255 + 2, np.uint8)
    steps, former = np.empty(_BLOCK, np.uint64), uint64(last)
    count, packed, grown = 0, _NONE, _NONE
    for begin in range(0, len(now), _BLOCK):
        new, old = now[begin : begin + _BLOCK], kept[begin : begin + _BLOCK]
        found, start = _find(new, old, places), first + begin
        taken = values[count : count + found]
        for at in range(found):
            place = places[at]
            taken[at], before[at] = new[place], old[place]
            old[place] = taken[at]
        for at in range(found):
            in_bytes = uint64(start + places[at]) * uint64(now.itemsize)
            shift, word = (in_bytes & _SEVEN) << _THREE, in_bytes >> _THREE
            change = _mix(uint64(taken[at]) << shift) - _mix(uint64(before[at]) << shift)
            grown += change * _key(word & (_SIZE - _ONE)) * _key(_SIZE + (word >> _WORDS))
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
    body, total = len(run) * run.itemsize // 8 * 8 // run.itemsize, _NONE
    words, size = run[:body].view(np.uint64), np.int64(_SIZE)
    for begin in range(0, len(words), size):
        own, part = words[begin : begin + size], _NONE
        for at in range(len(own)):
            part += _mix(own[at]) * _key(uint64(at))
        total += part * _key(_SIZE + (uint64(begin) >> _WORDS))
    word, rest = uint64(len(words)), _NONE
    for at in range(body, len(run)):
        rest |= uint64(run[at]) << uint64((at - body) * run.itemsize * 8)
    return total + _mix(rest) * _key(word & (_SIZE - _ONE)) * _key(_SIZE + (word >> _WORDS))


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
def _mix(word):
    return word + (word >> _HALF)


@njit(inline="always")
def _key(place):
    key = (place + _ONE) * _FIRST
    return ((key ^ (key >> _HALF)) * _SECOND) | _ONE
