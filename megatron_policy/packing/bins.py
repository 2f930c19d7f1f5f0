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
from megatron_policy.packing.cost import Cost
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
    cost: Cost,
) -> Bins:
    """Bins of at most `capacity` tokens that hold every sequence once; their number is a multiple
    of `multiple`.

    For every algorithm the number of bins is raised to the multiple by splitting the costliest.
    Bins are empty only if there are more of them than sequences. ConfigError for an unknown
    algorithm, BatchError for a sequence longer than the capacity.
    """
    name = checked_algorithm(algorithm)
    for row, length in enumerate(lengths):
        if length > capacity:
            raise BatchError(f"row {row} has {length} tokens, more than the {capacity} of a bin")
    if name == BALANCED:
        return balanced(lengths, capacity, multiple, cost)
    bins = _FITTING[name](lengths, capacity)
    return split_to(bins, round_up(len(bins), multiple), [cost(size) for size in lengths])


def checked_algorithm(name: str | None) -> str:
    """The algorithm in lower case, `balanced` for None; ConfigError naming them all."""
    found = BALANCED if name is None else name.lower()
    if found not in ALGORITHMS:
        legal = ", ".join(ALGORITHMS)
        raise ConfigError(
            f"policy.sequence_packing.algorithm={name!r} is unknown: use one of {legal}"
        )
    return found


def balanced(sizes: Sequence[int], capacity: int, multiple: int, cost: Cost) -> Bins:
    """The fewest bins found, a multiple of `multiple`, of costs as equal as possible.

    Each sequence, the costliest first, goes into the cheapest bin with room (Graham 1969, longest
    processing time first); exchanges between bins follow. If a sequence does not fit that way, the
    bins of first fit decreasing are balanced instead. If these are too many as well, `multiple`
    more bins are tried.
    """
    costs = [cost(size) for size in sizes]
    number = round_up(max(-(-sum(sizes) // capacity), 1), multiple)
    fitted = first_fit_decreasing(sizes, capacity)
    while True:
        bins = _cheapest_first(sizes, costs, capacity, number)
        if bins is None and len(fitted) <= number:
            bins = split_to(fitted, number, costs)
        if bins is not None:
            return levelled(bins, range(number), sizes, costs, capacity)
        number += multiple


def _cheapest_first(
    sizes: Sequence[int], costs: Sequence[float], capacity: int, number: int
) -> Bins | None:
    """`number` bins, or None if a sequence does not fit."""
    bins: Bins = [[] for _ in range(number)]
    room = [capacity] * number
    heap = [(0.0, bin_) for bin_ in range(number)]
    for item in _decreasing(sizes):
        full = []
        while heap and room[heap[0][1]] < sizes[item]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, chosen = heap[0]
        heapq.heapreplace(heap, (load + costs[item], chosen))
        bins[chosen].append(item)
        room[chosen] -= sizes[item]
        for each in full:
            heapq.heappush(heap, each)
    return bins


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
        for half in _halves(members, costs):
            if len(half) > 1:
                heapq.heappush(heap, (-sum(costs[item] for item in half), order, half))
                order += 1
            else:
                done.append(half)
    found = [*(members for _, _, members in sorted(heap)), *done]
    return found + [[] for _ in range(number - len(found))]


def _halves(members: Iterable[int], costs: Sequence[float]) -> tuple[list[int], list[int]]:
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0.0, 0.0]
    for item in sorted(members, key=costs.__getitem__, reverse=True):
        lower = int(loads[1] < loads[0])
        halves[lower].append(item)
        loads[lower] += costs[item]
    return halves


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
    return _first_fit(_decreasing(sizes), sizes, capacity)


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
    order = _decreasing(sizes)
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


def _decreasing(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))


_FITTING: dict[str, Callable[[Sequence[int], int], Bins]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}

ALGORITHMS: tuple[str, ...] = (BALANCED, *_FITTING)
"""All algorithms by name; those besides `balanced` are the host's."""
