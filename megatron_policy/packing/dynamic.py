"""Chooses which sequences share a padded microbatch with a token budget, from their lengths and
costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from megatron_policy.errors import BatchError
from megatron_policy.packing.bins import Bins
from megatron_policy.packing.cost import Cost
from megatron_policy.packing.multiples import round_up

ROUNDS = 40
"""Bisection steps in the search for the smallest possible maximum cost."""


def dynamic_bins(sizes: Sequence[int], token_budget: int, multiple: int, cost: Cost) -> Bins:
    """Bins of rows of neighbouring sizes, each at most `token_budget` tokens including padding.

    `sizes` are those of rows with their own padding; a bin's rows are padded to its largest. There
    are as few bins as fit, rounded up to a multiple of `multiple`. Of all ways to cut the sorted
    rows into that many, this is the one whose costliest bin is cheapest. Bins are empty only if
    there are more of them than rows. BatchError for a row that is longer than the budget.
    """
    for row, size in enumerate(sizes):
        if size > token_budget:
            raise BatchError(
                f"row {row} has {size} tokens with its padding, more than the {token_budget} of a "
                "microbatch"
            )
    order = sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))
    ordered = [sizes[row] for row in order]
    costs = [cost(size) for size in ordered]
    ends = _cut(ordered, costs, token_budget, float("inf"))
    number = round_up(max(len(ends), 1), multiple)
    low, high = max(costs, default=0.0), sum(costs)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        tried = _cut(ordered, costs, token_budget, middle)
        low, high = (low, middle) if len(tried) <= number else (middle, high)
        ends = tried if len(tried) <= number else ends
    cut = [order[start:end] for start, end in pairwise((0, *ends))]
    return _halved(cut, number, sizes, cost)


def _cut(sizes: Sequence[int], costs: Sequence[float], tokens: int, most: float) -> list[int]:
    """The ends of groups of rows, sorted from the longest: each group is within `tokens` and, with
    more than one row, within the cost `most`.
    """
    ends: list[int] = []
    start = 0
    for at in range(1, len(sizes) + 1):
        rows = at + 1 - start  # including the next one
        full = rows * sizes[start] > tokens or rows * costs[start] > most
        if at == len(sizes) or full:
            ends.append(at)
            start = at
    return ends


def _halved(bins: Bins, number: int, padded: Sequence[int], cost: Cost) -> Bins:
    """`number` bins: the costliest with two or more rows is cut in two until there are enough."""

    def entry(rows: list[int]) -> tuple[float, int, list[int]]:
        return (-len(rows) * cost(padded[rows[0]]) if len(rows) > 1 else 0.0, rows[0], rows)

    heap = [entry(rows) for rows in bins]
    heapq.heapify(heap)
    while len(heap) < number and heap and heap[0][0] < 0:
        _, _, rows = heapq.heappop(heap)
        middle = len(rows) // 2
        heapq.heappush(heap, entry(rows[:middle]))
        heapq.heappush(heap, entry(rows[middle:]))
    return [rows for _, _, rows in heap] + [[] for _ in range(number - len(heap))]
