"""Chooses which sequences share a packed microbatch, from their lengths and costs.

`sizes` are lengths in tokens; a bin is a list of indices into them.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.packing.balance import levelled
from megatron_policy.packing.multiples import round_up

Bins = list[list[int]]

BALANCED = "balanced"
"""Our own algorithm, and the default."""


def pack(
    lengths: Sequence[int],
    capacity: int,
    algorithm: str | None = None,
    *,
    multiple: int = 1,
    costs: Sequence[float],
) -> Bins:
    """Bins of at most `capacity` tokens that hold every sequence once; their number is a multiple
    of `multiple`. `costs` are those of the sequences.

    For every algorithm the number of bins is raised to the multiple by splitting the costliest.
    Bins are empty only if there are more of them than sequences. ConfigError for an unknown
    algorithm, BatchError for a sequence longer than the capacity.
    """
    name = checked_algorithm(algorithm)
    for row, length in enumerate(lengths):
        if length > capacity:
            raise BatchError(f"row {row} has {length} tokens, more than the {capacity} of a bin")
    if name == BALANCED:
        return balanced(lengths, costs, capacity, multiple)
    bins = _FITTING[name](lengths, capacity)
    return split_to(bins, round_up(len(bins), multiple), costs)


def checked_algorithm(name: str | None) -> str:
    """The algorithm in lower case, `balanced` for None; ConfigError naming them all."""
    found = BALANCED if name is None else name.lower()
    if found not in ALGORITHMS:
        legal = ", ".join(ALGORITHMS)
        raise ConfigError(
            f"policy.sequence_packing.algorithm={name!r} is unknown: use one of {legal}"
        )
    return found


def balanced(sizes: Sequence[int], costs: Sequence[float], capacity: int, multiple: int) -> Bins:
    """The fewest bins found, a multiple of `multiple`, of costs as equal as possible: each sequence
    goes into the cheapest bin with room; exchanges between bins follow.
    """
    order = decreasing(sizes)
    bins = fewest(
        sizes,
        costs,
        capacity,
        multiple,
        lambda number: cheapest_first(order, sizes, costs, capacity, [0.0] * number),
    )
    return levelled(bins, range(len(bins)), sizes, costs, capacity)


def fewest(
    sizes: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    multiple: int,
    tried: Callable[[int], Bins | None],
) -> Bins:
    """What `tried` makes of the fewest bins, a multiple of `multiple`, for which it does not return
    None; the bins of first fit decreasing, some of them split, if it needs more than these.
    """
    # Two sequences of more than half of a bin never share one.
    least = max(-(-sum(sizes) // capacity), sum(2 * size > capacity for size in sizes), 1)
    number = round_up(least, multiple)
    fitted: Bins | None = None
    while (bins := tried(number)) is None:
        fitted = first_fit_decreasing(sizes, capacity) if fitted is None else fitted
        if len(fitted) <= number:
            return split_to(fitted, number, costs)
        number += multiple
    return bins


class OpenBins:
    """Bins for items that come from the largest to the smallest; finds the bin with the lowest key
    among those that have room for the next one.

    Bins without room are kept apart until an item comes that fits, so that the search takes time
    that grows with the logarithm of the number of bins.
    """

    def __init__(self, keys: Sequence[float], capacity: int) -> None:
        self.bins: Bins = []
        self.keys: list[float] = []
        self._capacity = capacity
        self._room: list[int] = []
        self._open: list[tuple[float, int]] = []
        self._full: list[tuple[int, int]] = []
        for key in keys:
            self.add(key)

    def add(self, key: float) -> int:
        """Add an empty bin; return its number."""
        number = len(self.bins)
        self.bins.append([])
        self.keys.append(key)
        self._room.append(self._capacity)
        heapq.heappush(self._open, (key, number))
        return number

    def first(self, size: int) -> int | None:
        """The number of the bin with the lowest key that has room for `size`; None if none has."""
        while self._full and -self._full[0][0] >= size:
            _, number = heapq.heappop(self._full)
            heapq.heappush(self._open, (self.keys[number], number))
        while self._open and self._room[self._open[0][1]] < size:
            _, number = heapq.heappop(self._open)
            heapq.heappush(self._full, (-self._room[number], number))
        return self._open[0][1] if self._open else None

    def put(self, item: int, size: int, growth: float = 0.0) -> None:
        """Put the item into the bin that `first` found, whose key grows by `growth`."""
        number = self._open[0][1]
        self.bins[number].append(item)
        self.keys[number] += growth
        self._room[number] -= size
        heapq.heapreplace(self._open, (self.keys[number], number))


def cheapest_first(
    order: Iterable[int],
    sizes: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    loads: Sequence[float],
) -> Bins | None:
    """One bin for each of `loads`, the costs that they have in advance; None if an item does not
    fit. Each item of `order`, the largest first, goes into the cheapest bin that has room (Graham
    1969, longest processing time first).
    """
    open_ = OpenBins(loads, capacity)
    for item in order:
        if open_.first(sizes[item]) is None:
            return None
        open_.put(item, sizes[item], costs[item])
    return open_.bins


def split_to(bins: Bins, number: int, costs: Sequence[float]) -> Bins:
    """At least `number` bins: the costliest with two or more sequences is split into equal halves
    until there are enough; once every sequence has its own bin, empty bins are added.
    """
    heap = [
        (-sum(costs[item] for item in members), order, members)
        for order, members in enumerate(bins)
        if len(members) > 1
    ]
    heapq.heapify(heap)
    done = [members for members in bins if len(members) < 2]
    order = len(bins)
    while heap and len(done) + len(heap) < number:
        _, _, members = heapq.heappop(heap)
        halves, loads = (list[int](), list[int]()), [0.0, 0.0]
        for item in sorted(members, key=costs.__getitem__, reverse=True):
            lower = int(loads[1] < loads[0])
            halves[lower].append(item)
            loads[lower] += costs[item]
        for half in halves:
            if len(half) > 1:
                heapq.heappush(heap, (-sum(costs[item] for item in half), order, half))
                order += 1
            else:
                done.append(half)
    found = [*(members for _, _, members in sorted(heap)), *done]
    return found + [[] for _ in range(number - len(found))]


def concatenative(sizes: Sequence[int], capacity: int) -> Bins:
    """Sequences in the given order; one that does not fit opens the next bin (next fit)."""
    bins: Bins = []
    room = -1
    for item, size in enumerate(sizes):
        if size > room:
            bins.append([])
            room = capacity
        bins[-1].append(item)
        room -= size
    return bins


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """The longest first, each into the first bin that has room."""
    open_ = OpenBins((), capacity)
    for item in decreasing(sizes):
        if open_.first(sizes[item]) is None:
            open_.add(len(open_.bins))
        open_.put(item, sizes[item])
    return open_.bins


def first_fit_shuffle(sizes: Sequence[int], capacity: int) -> Bins:
    """In a fixed pseudo-random order, each into the first bin that has room."""
    order = list(range(len(sizes)))
    random.Random(len(sizes)).shuffle(order)
    return _first_fit(order, sizes, capacity)


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Johnson and Garey's: within 71/60 of the fewest bins possible; first fit decreasing is within
    11/9.

    Every sequence above half the capacity opens a bin. From the fullest bin on, each takes the
    longest that fits of those above a third. From the emptiest on, those without one take a pair of
    those above a sixth. Then each takes the longest sequences that fit, and the rest is packed
    first fit decreasing. Source: Johnson and Garey 1985, "A 71/60 theorem for bin packing".
    """
    order = decreasing(sizes)
    large = [item for item in order if 2 * sizes[item] > capacity]
    medium = [item for item in order if 2 * sizes[item] <= capacity < 3 * sizes[item]]
    small = [item for item in order if 3 * sizes[item] <= capacity < 6 * sizes[item]]
    tiny = [item for item in order if 6 * sizes[item] <= capacity]
    bins = [[item] for item in large]
    room = [capacity - sizes[item] for item in large]
    for rest in (medium, small, tiny):
        rest.reverse()  # the shortest first, as _largest_within needs them

    def put(number: int, item: int) -> None:
        bins[number].append(item)
        room[number] -= sizes[item]

    for number in range(len(bins)):
        at = _largest_within(medium, sizes, room[number])
        if at is not None:
            put(number, medium.pop(at))
    for number in reversed(range(len(bins))):
        pair = len(bins[number]) == 1 and len(small) > 1
        if pair and sizes[small[0]] + sizes[small[1]] <= room[number]:
            put(number, small.pop(0))
            at = _largest_within(small, sizes, room[number])
            assert at is not None
            put(number, small.pop(at))
    left = sorted((*medium, *small, *tiny), key=sizes.__getitem__)
    for number in range(len(bins)):
        while (at := _largest_within(left, sizes, room[number])) is not None:
            put(number, left.pop(at))
    return bins + _first_fit(reversed(left), sizes, capacity)


def _largest_within(items: Sequence[int], sizes: Sequence[int], room: int) -> int | None:
    """Index in `items`, sorted from the shortest, of the longest that fits."""
    at = bisect_right(items, room, key=sizes.__getitem__)
    return at - 1 if at else None


def _first_fit(order: Iterable[int], sizes: Sequence[int], capacity: int) -> Bins:
    bins: Bins = []
    room: list[int] = []
    for item in order:
        found = next((number for number, free in enumerate(room) if sizes[item] <= free), None)
        number = len(bins) if found is None else found
        if found is None:
            bins.append([])
            room.append(capacity)
        bins[number].append(item)
        room[number] -= sizes[item]
    return bins


def decreasing(sizes: Sequence[float]) -> list[int]:
    """The indices of `sizes` from the largest to the smallest; the first of equal ones first."""
    return sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))


_FITTING: dict[str, Callable[[Sequence[int], int], Bins]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}

ALGORITHMS: tuple[str, ...] = (BALANCED, *_FITTING)
"""All algorithms by name; those besides `balanced` are the host's."""
