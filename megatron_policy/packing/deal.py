"""Assigns bins to data-parallel ranks by their costs."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_policy.packing.balance import levelled


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign bins to `ranks`, the same number to each, with total costs as equal as possible.

    The costliest bin first goes to the rank with the lowest load that lacks bins; swaps follow.
    Each rank has its bins from the costliest to the cheapest, so that what the ranks compute at the
    same time costs about the same. `ranks` divides the number of bins.
    """
    share, left = divmod(len(costs), ranks)
    assert left == 0, f"{len(costs)} bins are not dealt evenly to {ranks} ranks"
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for bin_ in sorted(range(len(costs)), key=lambda b: (-costs[b], b)):
        open_ = [rank for rank in range(ranks) if len(dealt[rank]) < share]
        rank = min(open_, key=lambda r: (load[r], r))
        dealt[rank].append(bin_)
        load[rank] += costs[bin_]
    # Each bin has size 1 and no rank has room for another: only swaps keep the counts.
    dealt = levelled(dealt, range(ranks), [1] * len(costs), costs, share)
    return [sorted(bins, key=lambda b: (-costs[b], b)) for bins in dealt]
