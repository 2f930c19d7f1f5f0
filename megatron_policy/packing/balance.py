"""Balances cost by exchanging sequences between bins."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOLERANCE = 1e-4
"""Differences below this fraction of the mean are not worth an exchange."""


@dataclass(frozen=True)
class _Exchange:
    """`item` moves from one bin to another, in exchange for `back` (None for nothing); `moved` is
    the cost that changes sides.
    """

    item: int
    source: int
    back: int | None
    target: int
    moved: float


@dataclass(frozen=True)
class _State:
    """Bins as sorted lists of (cost, item), the cost of each and the free tokens in it, each
    owner's bins and their total cost. `turns` is None, or the turn of every bin; `longest` is then
    the cost of the costliest bin of each turn.
    """

    bins: list[list[tuple[float, int]]]
    cost: list[float]
    room: list[int]
    held: list[list[int]]
    load: list[float]
    turns: Sequence[int] | None
    longest: list[float]

    def partners(self, source: int, low: int) -> Sequence[int]:
        """The bins of owner `low` with which bin `source` can exchange sequences."""
        return self.held[low] if self.turns is None else (self.held[low][self.turns[source]],)

    def slack(self, target: int) -> float:
        """How much the cost of bin `target` can grow before its turn takes longer."""
        if self.turns is None:
            return float("inf")
        return self.longest[self.turns[target]] - self.cost[target]

    def preference(self, exchange: _Exchange, gap: float) -> tuple[float, float]:
        """The smallest is the best: how much longer a turn takes for the cost that is moved, then
        the distance to half of the gap.
        """
        longer = max(exchange.moved - self.slack(exchange.target), 0.0)
        return longer / exchange.moved, abs(exchange.moved - gap / 2)


def levelled(
    bins: Sequence[Sequence[int]],
    owners: Sequence[int],
    sizes: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    turns: Sequence[int] | None = None,
) -> list[list[int]]:
    """The same bins after exchanges that make the total cost of every owner's bins as equal as
    single moves and swaps can; `owners[b]`, counted from 0, owns bin b.

    No bin exceeds `capacity` that did not before. Where costs do not grow with sizes, fewer
    exchanges are found. With `turns`, which gives the turn of each bin, exchanges are between bins
    of the same turn, and preferably such that its costliest bin becomes no costlier; every owner
    then has one bin of each turn, in their order.
    """
    held: list[list[int]] = [[] for _ in range(max(owners, default=-1) + 1)]
    load = [0.0] * len(held)
    cost = [sum(costs[item] for item in members) for members in bins]
    longest = [0.0] * (max(turns or (), default=-1) + 1)
    for number, owner in enumerate(owners):
        held[owner].append(number)
        load[owner] += cost[number]
        if turns is not None:
            # Rounding errors of sums must not look like a longer turn.
            longest[turns[number]] = max(longest[turns[number]], cost[number] * (1 + 1e-9))
    room = [capacity - sum(sizes[item] for item in members) for members in bins]
    ordered = [sorted((costs[item], item) for item in members) for members in bins]
    state = _State(ordered, cost, room, held, load, turns, longest)
    mean = sum(load) / max(len(load), 1)
    # The largest load never grows, so this ends; the bound only limits time.
    for _ in range(4 * len(sizes)):
        order = sorted(range(len(load)), key=load.__getitem__)
        found = _between(state, order, sizes, TOLERANCE * mean)
        if found is None:
            break
        _apply(state, found, sizes, costs)
        load[owners[found.source]] -= found.moved
        load[owners[found.target]] += found.moved
    return [[item for _, item in members] for members in state.bins]


def _between(
    state: _State, order: Sequence[int], sizes: Sequence[int], least: float
) -> _Exchange | None:
    """An exchange that relieves the highest owner, with the lowest other one that can take it."""
    if not order:
        return None
    high = order[-1]
    for low in order[:-1]:
        gap = state.load[high] - state.load[low]
        if gap <= 2 * least:
            break
        best: _Exchange | None = None
        for exchange in _exchanges(state, high, low, gap, sizes):
            if not least < exchange.moved < gap - least:
                continue
            if best is None or state.preference(exchange, gap) < state.preference(best, gap):
                best = exchange
        if best is not None:
            return best
    return None


def _exchanges(
    state: _State, high: int, low: int, gap: float, sizes: Sequence[int]
) -> Iterator[_Exchange]:
    """Every move, and for each item the swap that comes nearest to halving the gap; also the one
    that comes nearest to it without making a turn longer.
    """
    for source in state.held[high]:
        for target in state.partners(source, low):
            slack, last = state.slack(target), -1.0
            for cost, item in state.bins[source]:
                if cost == last:
                    continue  # the same exchanges again
                last = cost
                if sizes[item] <= state.room[target]:
                    yield _Exchange(item, source, None, target, cost)
                members = state.bins[target]
                at = bisect_left(members, (cost - gap / 2, -1))
                if at:
                    yield from _swap(state, item, cost, source, target, at - 1, sizes)
                yield from _first_swap(state, item, cost, source, target, at, sizes)
                if 0 < slack < gap / 2:
                    at = bisect_left(members, (cost - slack, -1))
                    yield from _first_swap(state, item, cost, source, target, at, sizes)


def _first_swap(
    state: _State, item: int, cost: float, source: int, target: int, at: int, sizes: Sequence[int]
) -> Iterator[_Exchange]:
    """The swap with the first item from `at` on that fits, if it is cheaper than `item`."""
    members = state.bins[target]
    fitting = sizes[item] - state.room[target]
    at = bisect_left(members, fitting, at, key=lambda member: sizes[member[1]])
    if at < len(members) and members[at][0] < cost:
        yield from _swap(state, item, cost, source, target, at, sizes)


def _swap(
    state: _State, item: int, cost: float, source: int, target: int, at: int, sizes: Sequence[int]
) -> Iterator[_Exchange]:
    back_cost, back = state.bins[target][at]
    grows = sizes[item] - sizes[back]
    if grows <= state.room[target] and -grows <= state.room[source]:
        yield _Exchange(item, source, back, target, cost - back_cost)


def _apply(
    state: _State, exchange: _Exchange, sizes: Sequence[int], costs: Sequence[float]
) -> None:
    for item, source, target in (
        (exchange.item, exchange.source, exchange.target),
        (exchange.back, exchange.target, exchange.source),
    ):
        if item is not None:
            state.bins[source].remove((costs[item], item))
            insort(state.bins[target], (costs[item], item))
            state.room[source] += sizes[item]
            state.room[target] -= sizes[item]
    state.cost[exchange.source] -= exchange.moved
    state.cost[exchange.target] += exchange.moved
    if state.turns is not None:
        turn = state.turns[exchange.target]
        state.longest[turn] = max(state.longest[turn], state.cost[exchange.target])
