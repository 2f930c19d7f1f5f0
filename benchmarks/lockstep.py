"""Scorecard row 14: how well ranks keep pace where they wait for each other in every microbatch.

A cost model over real plans, not a timing.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.packing import MODEL
from benchmarks.results import Measurement
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.packing.plan import plan_rows

RANKS, CAPACITY, DRAWS = 32, 8192, 5
GROUP = 8
"""Ranks of a smaller expert group, neighbours of each other."""
LENGTHS = {"600": (600, 1.0), "1500": (1500, 0.9), "3000": (3000, 0.8)}
"""Median and sigma of log-normal lengths, which are limited to the capacity."""
ROWS = (512, 1024, 2048)
MANY = 8192

COST = sequence_cost(MODEL)


def lockstep_efficiency(folder: Path, repetitions: int) -> Measurement:
    """The efficiency of the plans of `balanced` over the most that any plan can have, of the worst
    of nine kinds of batches; also reports both, means over draws.
    """
    beside: dict[str, float] = {}
    ratios = []
    for name, rows in ((name, rows) for name in LENGTHS for rows in ROWS):
        draws = [lengths(name, rows, seed) for seed in range(DRAWS)]
        tables = [planned(draw) for draw in draws]
        assert all(len(table[0]) > 1 for table in tables), "one microbatch needs no lockstep"
        found = [efficiency(table) for table in tables]
        most = [bound(draw) for draw in draws]
        ratios.append(mean(own / limit for own, limit in zip(found, most, strict=True)))
        kind = f"{rows} rows of median {name}"
        beside[kind] = round(mean(found), 4)
        beside[f"{kind}, at most"] = round(mean(most), 4)
        beside[f"{kind}, groups of {GROUP}"] = round(
            mean(efficiency(table, GROUP) for table in tables), 4
        )
    runs: dict[str, list[float]] = {f"plan of {rows} rows": [] for rows in (ROWS[0], MANY)}
    for _ in range(repetitions):
        for rows in (ROWS[0], MANY):
            draw = lengths("600", rows, 0)
            started = time.process_time()
            planned(draw)
            runs[f"plan of {rows} rows"].append(time.process_time() - started)
    return Measurement(
        min(ratios),
        {name: tuple(seconds) for name, seconds in runs.items()},
        "every row once, no microbatch above its tokens, equally many on every rank",
        beside,
    )


def lengths(name: str, rows: int, seed: int) -> list[int]:
    """A draw of `rows` lengths."""
    median, sigma = LENGTHS[name]
    source = random.Random(seed)
    drawn = (source.lognormvariate(math.log(median), sigma) for _ in range(rows))
    return [min(max(round(length), 1), CAPACITY) for length in drawn]


def planned(draw: Sequence[int]) -> list[list[float]]:
    """The cost of every microbatch of every rank."""
    shares = plan_rows(draw, Batching("packed", CAPACITY), RANKS, 1, COST)
    assert sorted(row for share in shares for row in share.rows) == list(range(len(draw)))
    table = []
    for share in shares:
        spans = share.plan.batches[0]
        rows = [[draw[row] for row in share.rows[span.start : span.end]] for span in spans]
        assert all(sum(own) <= CAPACITY for own in rows)
        table.append([sum(map(COST, own)) for own in rows])
    assert len({len(own) for own in table}) == 1
    return table


def efficiency(table: Sequence[Sequence[float]], group: int | None = None) -> float:
    """The mean cost of a rank over the time of a step in which the ranks wait for each other in
    every microbatch, or those of each `group`, and all of them at its end. `table` has the cost of
    every microbatch of every rank.
    """
    size = group or len(table)
    groups = (table[start : start + size] for start in range(0, len(table), size))
    time_of = (sum(max(costs) for costs in zip(*each, strict=True)) for each in groups)
    return mean(sum(costs) for costs in table) / max(time_of)


def bound(draw: Sequence[int]) -> float:
    """An efficiency that no plan exceeds, whatever its number of microbatches.

    The longest sequence makes its turn cost at least as much as itself. The tokens that ranks can
    have in that turn cost most if they are those of the longest sequences, because attention makes
    each token of a longer sequence costlier. Everything else takes at least the mean over ranks.
    """
    room, filled = RANKS * CAPACITY, 0.0
    for length in sorted(draw, reverse=True):
        taken = min(length, room)
        filled += COST(length) * taken / length
        room -= taken
    whole = sum(map(COST, draw)) / RANKS
    return whole / (whole + max(COST(max(draw)) - filled / RANKS, 0.0))
