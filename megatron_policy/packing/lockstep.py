"""Assigns bins to ranks so that all ranks keep pace: microbatch i costs about the same on each.

Ranks that share experts wait for each other in every layer, so a microbatch takes as long as on the
rank where it costs most. A turn is microbatch i of every rank; its duration is the cost of its
costliest bin. Other ranks wait for each other once, at the end of the step, when it is the total
costs that have to be equal. Both are made equal here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_policy.packing.balance import levelled
from megatron_policy.packing.bins import Bins, OpenBins, cheapest_first, decreasing, fewest

HEAVY_TURNS = 4
"""How many turns are filled around long sequences at most."""


def balanced_shares(
    sizes: Sequence[int], costs: Sequence[float], capacity: int, ranks: int, multiple: int
) -> list[Bins]:
    """Every rank's bins of at most `capacity` tokens, one of each turn: the fewest found, the
    same number on each rank and a multiple of `multiple`, with turns as short and total costs as
    equal as they can be made.
    """

    def tried(number: int) -> Bins | None:
        plans = _plans(sizes, costs, capacity, ranks, number // ranks)
        return min(plans, key=lambda bins: _waiting(bins, costs, ranks), default=None)

    bins = fewest(sizes, costs, capacity, ranks * multiple, tried)
    ordered = decreasing(_totals(bins, costs))
    level: Bins = []
    for start in range(0, len(bins), ranks):
        turn = [bins[number] for number in ordered[start : start + ranks]]
        level.extend(levelled(turn, range(ranks), sizes, costs, capacity))
    places = [number for own in in_turns(_totals(level, costs), ranks) for number in own]
    owners, turns = _owners_and_turns(len(bins), ranks)
    bins = [level[number] for number in places]
    bins = levelled(bins, owners, sizes, costs, capacity, turns)
    # Where exchanges within turns leave the totals unequal, others follow.
    bins = levelled(bins, owners, sizes, costs, capacity)
    share = len(bins) // ranks
    return [bins[start : start + share] for start in range(0, len(bins), share)]


def assign_to_ranks(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign bins to `ranks`, the same number to each, with total costs as equal as possible and
    turns as short as that allows. Each rank has its bins from the costliest to the cheapest.
    `ranks` divides the number of bins.
    """
    share, left = divmod(len(costs), ranks)
    assert left == 0, f"{len(costs)} bins are not assigned evenly to {ranks} ranks"
    assigned = in_turns(costs, ranks)
    # Each bin has size 1 and no rank has room for another: only swaps keep the counts.
    assigned = levelled(assigned, range(ranks), [1] * len(costs), costs, share)
    return [sorted(bins, key=lambda b: (-costs[b], b)) for bins in assigned]


def in_turns(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Each rank's bins, one of each turn. Turns are as short as these bins allow: the first has the
    costliest, and so on. Total costs are as equal as assigning the bins of each turn can make them.
    """
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    order = decreasing(costs)
    for start in range(0, len(order), ranks):
        lightest = sorted(range(ranks), key=load.__getitem__)
        for rank, bin_ in zip(lightest, order[start : start + ranks], strict=True):
            assigned[rank].append(bin_)
            load[rank] += costs[bin_]
    owners, turns = _owners_and_turns(len(costs), ranks)
    # Each bin has size 1 and its place has room for one: only swaps within turns are possible.
    places = [[bin_] for bins in assigned for bin_ in bins]
    placed = levelled(places, owners, [1] * len(costs), costs, 1, turns)
    for (bin_,), rank, turn in zip(placed, owners, turns, strict=True):
        assigned[rank][turn] = bin_
    return assigned


def _plans(
    sizes: Sequence[int], costs: Sequence[float], capacity: int, ranks: int, turns: int
) -> Iterator[Bins]:
    """Bins with no heavy turn, with one, and so on, as far as all sequences fit into `turns`.

    A sequence that costs more than the mean of the bins makes its turn long in any case. In a heavy
    turn the other bins are filled up with long sequences to the same cost, as far as their tokens
    allow, so that all later turns are shorter.
    """
    items = decreasing(sizes)
    heavy: Bins = []
    for number in range(min(turns, HEAVY_TURNS + 1)):
        others = turns - number
        if number:
            longest = max((costs[item] for item in items), default=0.0)
            if longest * ranks * (others + 1) <= sum(costs[item] for item in items):
                return
            open_ = OpenBins([0.0] * ranks, capacity)
            left = []
            for each in items:
                chosen = open_.first(sizes[each])
                if chosen is None or open_.keys[chosen] + costs[each] > longest:
                    left.append(each)
                else:
                    open_.put(each, sizes[each], costs[each])
            bins, items = open_.bins, left
            heavy.extend(bins)
        # What a rank has in heavy turns is made up for in its other turns, in each to equal parts.
        totals = _totals(heavy, costs)
        loads = [sum(totals[bin_] for bin_ in own) / others for own in in_turns(totals, ranks)]
        rest = cheapest_first(items, sizes, costs, capacity, loads * others)
        if rest is not None:
            yield [*heavy, *rest]


def _waiting(bins: Bins, costs: Sequence[float], ranks: int) -> float:
    """The duration of the step if ranks wait for each other in every turn, plus that if they wait
    only at its end.
    """
    totals = _totals(bins, costs)
    turns = sum(sorted(totals, reverse=True)[::ranks])
    return turns + max(sum(totals[bin_] for bin_ in own) for own in in_turns(totals, ranks))


def _totals(bins: Bins, costs: Sequence[float]) -> list[float]:
    return [sum(costs[item] for item in members) for members in bins]


def _owners_and_turns(number: int, ranks: int) -> tuple[list[int], list[int]]:
    """The rank and the turn of each of `number` bins, rank after rank."""
    share = number // ranks
    return [bin_ // share for bin_ in range(number)], [bin_ % share for bin_ in range(number)]
