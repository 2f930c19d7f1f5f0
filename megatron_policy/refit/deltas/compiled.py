"""What `arrays.py` computes, in loops that numba compiles: each element is read once.

Compiling takes seconds, once for each size of elements; the result is kept on the disk.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import overload

from megatron_policy.refit.deltas import arrays
from megatron_policy.refit.digest import FIRST, SECOND

_BLOCK = 1 << 17  # elements at a time: what is compared is still in the cache when it is copied
_NONE, _ONE, _THREE, _SEVEN = uint64(0), uint64(1), uint64(3), uint64(7)
_HALF, _QUARTERS = uint64(32), uint64(48)
_FIRST, _SECOND, _MOST = uint64(FIRST), uint64(SECOND), uint64(arrays.MOST)


@njit(nogil=True, cache=True)
def take_changes(now, starts, length, kept, first, last, nan):
    """See `arrays.take_changes`."""
    words, size, total = kept.view(np.uint64), uint64(kept.itemsize), len(starts) * length
    places, values = np.empty(_BLOCK + 2, np.uint32), np.empty(total, kept.dtype)
    before, after = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    gaps = np.empty(total + (first + total - last) // 255 + 2, np.uint8)
    steps, former = np.empty(_BLOCK, np.uint64), uint64(last)
    count, packed, grown, blocks = 0, _NONE, _NONE, (length + _BLOCK - 1) // _BLOCK
    for block in range(len(starts) * blocks):
        run, begin = block // blocks, block % blocks * _BLOCK
        new = now[starts[run] + begin : starts[run] + min(begin + _BLOCK, length)]
        start = first + run * length + begin
        old = kept[start : start + len(new)]
        found = _find(new, old, places, nan)
        for at in range(found):  # several in a word change it one after another
            in_bytes = (uint64(start) + uint64(places[at])) * size
            value = _round(new[places[at]], old[places[at]], nan)
            word = words[in_bytes >> _THREE]
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
def _find(now, kept, places, nan):
    """Where they differ, in order. A branch for each flag would be guessed wrong each time."""
    found, body = _NONE, len(now) // 64 * 64
    for first in range(0, body, 64):
        flags = _NONE
        for bit in range(64):
            old = kept[first + bit]
            flags |= uint64(_round(now[first + bit], old, nan) != old) << uint64(bit)
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
        found += uint64(_round(now[place], kept[place], nan) != kept[place])
    return np.int64(found)


def _round(element, old, nan):
    """An element as one of the type of `old`: of fp32 as bfloat16."""
    raise NotImplementedError


@overload(_round)
def _compile_round(element, old, nan):
    def round_fp32(element, old, nan):
        is_nan = element & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
        half = np.uint32(0x7FFF) + (element >> np.uint32(16) & np.uint32(1))
        return nan if is_nan else np.uint16(np.uint32(element + half) >> np.uint32(16))

    return (lambda element, old, nan: element) if element == old else round_fp32


@njit(inline="always")
def _mix(word, key):
    mixed = word * key
    mixed = ((mixed ^ (mixed >> _QUARTERS)) + _ONE) * key
    return mixed ^ (mixed >> _HALF)


@njit(inline="always")
def _key(place):
    key = (place + _ONE) * _FIRST
    return ((key ^ (key >> _HALF)) * _SECOND) | _ONE
