"""Chooses which sequences share a padded microbatch with a token budget, from their lengths and
costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from megatron_policy.errors import BatchError
from megatron_policy.packing.bins import Bins
from megatron_policy.packing.cost import Cost
from megatron_policy.packing.multiples import round_up

ROUNDS = 40
"""Bisection steps in the search for the smallest possible maximum cost."""


@dataclass(frozen=True)
class _Sorted:
    """Rows from the longest to the shortest, and what a bin of them may have at most."""

    costs: Sequence[float]
    """Of each without its pictures."""
    sizes: Sequence[int]
    patches: Sequence[int]
    """Of all rows before each, and of all."""
    tokens: int
    most_patches: float
    cost: Cost

    def sum_costs(self, start: int, end: int) -> float:
        """The cost of a bin of the rows from `start` to `end`."""
        seen = self.patches[end] - self.patches[start]
        return (end - start) * self.costs[start] + self.cost(0, seen)

    def cut(self, most: float) -> list[int]:
        """The ends of bins, each within its limits and, with more than one row, within the cost
        `most`.
        """
        ends: list[int] = []
        start = 0
        for at in range(1, len(self.sizes) + 1):
            full = at == len(self.sizes) or (
                (at + 1 - start) * self.sizes[start] > self.tokens
                or self.patches[at + 1] - self.patches[start] > self.most_patches
                or self.sum_costs(start, at + 1) > most
            )
            if full:
                ends.append(at)
                start = at
        return ends


def dynamic_bins(
    sizes: Sequence[int],
    token_budget: int,
    multiple: int,
    cost: Cost,
    patches: Sequence[int] | None = None,
    most_patches: int | None = None,
) -> Bins:
    """Bins of rows of neighbouring sizes, each at most `token_budget` tokens including padding.

    `sizes` are those of rows with their own padding; a bin's rows are padded to its largest. Their
    pictures have these `patches`, those of a bin at most `most_patches` together. There are as few
    bins as fit, rounded up to a multiple of `multiple`. Of all ways to cut the sorted rows into
    that many, this is the one whose costliest bin is cheapest. Bins are empty only if there are
    more of them than rows. BatchError for a row that is longer than the budget.
    """
    for row, size in enumerate(sizes):
        if size > token_budget:
            raise BatchError(
                f"row {row} has {size} tokens with its padding, more than the {token_budget} of a "
                "microbatch"
            )
    seen = [0] * len(sizes) if patches is None else patches
    order = sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))
    ordered = [sizes[row] for row in order]
    costs = [cost(size) for size in ordered]
    before = [0, *accumulate(seen[row] for row in order)]
    rows = _Sorted(costs, ordered, before, token_budget, most_patches or inf, cost)
    ends = rows.cut(inf)
    number = round_up(max(len(ends), 1), multiple)
    low = max((rows.sum_costs(row, row + 1) for row in range(len(sizes))), default=0.0)
    high = sum(costs) + cost(0, before[-1])
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        tried = rows.cut(middle)
        low, high = (low, middle) if len(tried) <= number else (middle, high)
        ends = tried if len(tried) <= number else ends
    cut = [order[start:end] for start, end in pairwise((0, *ends))]
    return _halved(cut, number, sizes, seen, cost)


def _halved(
    bins: Bins, number: int, padded: Sequence[int], patches: Sequence[int], cost: Cost
) -> Bins:
    """`number` bins: the costliest with two or more rows is cut in two until there are enough."""

    def entry(rows: list[int]) -> tuple[float, int, list[int]]:
        found = len(rows) * cost(padded[rows[0]]) + cost(0, sum(patches[row] for row in rows))
        return (-found if len(rows) > 1 else 0.0, rows[0], rows)

    heap = [entry(rows) for rows in bins]
    heapq.heapify(heap)
    while len(heap) < number and heap and heap[0][0] < 0:
        _, _, rows = heapq.heappop(heap)
        middle = len(rows) // 2
        heapq.heappush(heap, entry(rows[:middle]))
        heapq.heappush(heap, entry(rows[middle:]))
    return [rows for _, _, rows in heap] + [[] for _ in range(number - len(heap))]
