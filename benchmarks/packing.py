"""Scorecard row 9: the share of a step spent on valid tokens, while no rank waits for another.

A cost model over real plans, not a timing.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.results import Measurement
from megatron_policy.converters.architecture import Architecture, Attention, Mlp, Rope, stack
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.bins import ALGORITHMS, Bins, modified_first_fit_decreasing
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.packing.plan import RankPlan, plan_rows
from megatron_policy.packing.tokens import packed_layout

RANKS, ROWS, CAPACITY = 32, 512, 8192
MEDIAN, SIGMA, DRAWS = 600, 1.0, 5
ROUND = 64
"""The multiple to which the host rounds dynamic batches and packed sequences."""

MODEL = Architecture(
    layers=stack(
        28,
        Attention(num_attention_heads=28, num_query_groups=4, kv_channels=128, rope=Rope(1e6)),
        Mlp(ffn_hidden_size=18944),
    ),
    hidden_size=3584,
    vocab_size=152064,
    max_position_embeddings=32768,
    layernorm_epsilon=1e-6,
    tied=False,
)
COST = sequence_cost(MODEL)


@dataclass(frozen=True)
class Work:
    """What one data-parallel rank computes: tokens, including padding, and their cost."""

    tokens: int
    cost: float


def step_efficiency(folder: Path, repetitions: int) -> Measurement:
    """The mean over draws of token efficiency x balance of `balanced`, the worse of one and two
    context-parallel ranks; also reports the other algorithms and methods.
    """
    draws = [lengths(seed) for seed in range(DRAWS)]
    ways = _ways()
    beside = {name: mean(efficiency(way(draw), draw) for draw in draws) for name, way in ways}
    runs: dict[str, list[float]] = {name: [] for name, _ in ways}
    for _ in range(repetitions):
        for name, way in ways:
            started = time.process_time()
            way(draws[0])
            runs[name].append(time.process_time() - started)
    return Measurement(
        min(beside["balanced"], beside["balanced, CP 2"]),
        {name: tuple(seconds) for name, seconds in runs.items()},
        "every row once, no microbatch above its tokens, equally many on every rank",
        {name: round(value, 4) for name, value in beside.items()},
    )


def lengths(seed: int) -> list[int]:
    """A draw of ROWS log-normal lengths, limited to the capacity."""
    source = random.Random(seed)
    drawn = (source.lognormvariate(math.log(MEDIAN), SIGMA) for _ in range(ROWS))
    return [min(max(round(length), 1), CAPACITY) for length in drawn]


def efficiency(ranks: Sequence[Work], draw: Sequence[int]) -> float:
    """Valid tokens over computed tokens, times the mean of the ranks' costs over the largest."""
    costs = [work.cost for work in ranks]
    return sum(draw) / sum(work.tokens for work in ranks) * mean(costs) / max(costs)


def _ways() -> list[tuple[str, Callable[[Sequence[int]], list[Work]]]]:
    packed = [
        (name if context == 1 else f"{name}, CP {context}", _packed(name, context))
        for context, names in ((1, ALGORITHMS), (2, ("balanced",)))
        for name in names
    ]
    return [*packed, ("dynamic", _dynamic), ("bins dealt in turn", dealt_in_turn)]


def _packed(algorithm: str, context: int) -> Callable[[Sequence[int]], list[Work]]:
    multiple = 2 * context if context > 1 else 1
    settings = Batching("packed", CAPACITY, multiple, algorithm)

    def work(draw: Sequence[int], share: RankPlan) -> Work:
        tokens = 0
        for span in share.plan.batches[0]:
            rows = [draw[row] for row in share.rows[span.start : span.end]]
            layout = packed_layout(rows, CAPACITY, multiple, multiple, context)
            assert sum(rows) <= layout.full_length <= CAPACITY
            tokens += layout.full_length
        return Work(tokens, sum(COST(settings.size(draw[row])) for row in share.rows))

    def way(draw: Sequence[int]) -> list[Work]:
        shares = _checked(plan_rows(draw, settings, RANKS, 1, COST, CAPACITY))
        return [work(draw, share) for share in shares]

    return way


def _dynamic(draw: Sequence[int]) -> list[Work]:
    settings = Batching("dynamic", CAPACITY, ROUND)
    shares = _checked(plan_rows(draw, settings, RANKS, 1, COST, CAPACITY))
    spans = [[(s.end - s.start, s.length) for s in share.plan.batches[0]] for share in shares]
    assert all(rows * length <= CAPACITY for each in spans for rows, length in each)
    return [
        Work(sum(rows * length for rows, length in each), sum(r * COST(n) for r, n in each))
        for each in spans
    ]


def dealt_in_turn(draw: Sequence[int]) -> list[Work]:
    """What hosts do: lengths rounded up and packed by modified first fit decreasing; then, until
    the ranks divide the bins, the fullest bin's last sequence moves to a new bin; every 32nd bin
    goes to the same rank.
    """
    sizes = [-(-length // ROUND) * ROUND for length in draw]
    bins: Bins = modified_first_fit_decreasing(sizes, CAPACITY)
    fullest = sorted(bins, key=len, reverse=True)
    at = 0
    while len(bins) % RANKS:
        while len(fullest[at]) == 1:
            at += 1
        bins.append([fullest[at].pop()])
    taken = [[row for bin_ in bins[rank::RANKS] for row in bin_] for rank in range(RANKS)]
    return [Work(sum(sizes[r] for r in rows), sum(COST(sizes[r]) for r in rows)) for rows in taken]


def _checked(shares: list[RankPlan]) -> list[RankPlan]:
    assert sorted(row for share in shares for row in share.rows) == list(range(ROWS))
    assert len({len(share.plan.batches[0]) for share in shares}) == 1
    return shares
