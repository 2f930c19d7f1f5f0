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
    """Bins as sorted lists of (cost, item), the free tokens in each, and each owner's bins."""

    bins: list[list[tuple[float, int]]]
    room: list[int]
    held: list[list[int]]
    load: list[float]


def levelled(
    bins: Sequence[Sequence[int]],
    owners: Sequence[int],
    sizes: Sequence[int],
    costs: Sequence[float],
    capacity: int,
) -> list[list[int]]:
    """The same bins after exchanges that make the total cost of every owner's bins as equal as
    single moves and swaps can; `owners[b]`, counted from 0, owns bin b.

    No bin exceeds `capacity` that did not before. Costs grow with sizes.
    """
    state = _state(bins, owners, sizes, costs, capacity)
    mean = sum(state.load) / max(len(state.load), 1)
    # The largest load never grows, so this ends; the bound only limits time.
    for _ in range(4 * len(sizes)):
        order = sorted(range(len(state.load)), key=state.load.__getitem__)
        found = _between(state, order, sizes, TOLERANCE * mean)
        if found is None:
            break
        high, low, exchange = found
        _apply(state, exchange, sizes, costs)
        state.load[high] -= exchange.moved
        state.load[low] += exchange.moved
    return [[item for _, item in members] for members in state.bins]


def _state(
    bins: Sequence[Sequence[int]],
    owners: Sequence[int],
    sizes: Sequence[int],
    costs: Sequence[float],
    capacity: int,
) -> _State:
    held: list[list[int]] = [[] for _ in range(max(owners, default=-1) + 1)]
    load = [0.0] * len(held)
    for number, (members, owner) in enumerate(zip(bins, owners, strict=True)):
        held[owner].append(number)
        load[owner] += sum(costs[item] for item in members)
    room = [capacity - sum(sizes[item] for item in members) for members in bins]
    return _State([sorted((costs[i], i) for i in members) for members in bins], room, held, load)


def _between(
    state: _State, order: Sequence[int], sizes: Sequence[int], least: float
) -> tuple[int, int, _Exchange] | None:
    """An exchange that relieves the highest owner, with the lowest other one that can take it."""
    if not order:
        return None
    high = order[-1]
    for low in order[:-1]:
        gap = state.load[high] - state.load[low]
        best: _Exchange | None = None
        for exchange in _exchanges(state, high, low, gap, sizes):
            if not least < exchange.moved < gap - least:
                continue
            if best is None or abs(exchange.moved - gap / 2) < abs(best.moved - gap / 2):
                best = exchange
        if best is not None:
            return high, low, best
    return None


def _exchanges(
    state: _State, high: int, low: int, gap: float, sizes: Sequence[int]
) -> Iterator[_Exchange]:
    """Every move, and for each item the swap that comes nearest to halving the gap."""
    for source in state.held[high]:
        for cost, item in state.bins[source]:
            for target in state.held[low]:
                if sizes[item] <= state.room[target]:
                    yield _Exchange(item, source, None, target, cost)
                members = state.bins[target]
                at = bisect_left(members, (cost - gap / 2, -1))
                if at:
                    yield from _swap(state, item, cost, source, target, at - 1, sizes)
                while at < len(members) and members[at][0] < cost:
                    fitting = list(_swap(state, item, cost, source, target, at, sizes))
                    yield from fitting
                    if fitting:
                        break
                    at += 1


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
