"""Log-probabilities of fixed rows of tokens on two sides, and whether their difference is rounding.

Shapes: rows are lists of token ids; log-probabilities are those of each token but a row's first,
given those before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_policy.dtypes import name_dtype
from megatron_policy.errors import ConfigError, RefitError

Rows = Sequence[Sequence[int]]
Logprobs = list[list[float]]

ROUNDING = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""The largest mean distance, in nats, that sums in another order and other kernels explain. Of fp32
about 1e-6 of the logits' size is seen, and ten times that in deep models; bf16 keeps 16 bits less,
which grows with depth to 1e-2 in healthy pairs of engines; fp16 has 3 bits more than bf16.
"""
ONE_TOKEN = 20.0
"""A single token can be this many times as far as the mean: the largest of some hundred roundings,
and of a mixture of experts a token that takes another expert.
"""
WORST = 4  # tokens that are named


class Token(NamedTuple):
    """A token's log-probability on both sides."""

    row: int
    position: int
    token: int
    policy: float
    engine: float

    @property
    def distance(self) -> float:
        return abs(self.policy - self.engine)

    def __str__(self) -> str:
        return (
            f"token {self.token} at position {self.position} of row {self.row} "
            f"({self.policy:.4g} of the policy, {self.engine:.4g} of the engine)"
        )


@dataclass(frozen=True)
class Tolerance:
    """How far apart two sides can be without a reason to look for: on average, and at one token."""

    mean: float
    token: float
    reason: str

    @classmethod
    def of(cls, dtypes: Iterable[torch.dtype], given: float | None = None) -> Tolerance:
        """That of the coarsest of the dtypes; or with the mean as `given`. ConfigError for a dtype
        whose rounding is not known, or a number that is none.
        """
        if given is not None:
            if not 0.0 <= given < math.inf:
                raise ConfigError(f"tolerance is {given}: give a finite number, 0 or more")
            return cls(given, ONE_TOKEN * given, "as given")
        found = list(dtypes)
        if unknown := [name_dtype(dtype) for dtype in found if dtype not in ROUNDING]:
            raise ConfigError(
                f"how much {unknown[0]} rounds is not known: give a tolerance, the largest mean "
                "difference of log-probabilities"
            )
        coarsest = max(found, key=ROUNDING.__getitem__)
        mean = ROUNDING[coarsest]
        return cls(mean, ONE_TOKEN * mean, f"for {name_dtype(coarsest)}")


@dataclass(frozen=True)
class EngineComparison:
    """What two sides say of the same rows."""

    all_tokens: tuple[Token, ...]
    """Those that are furthest apart first."""
    mean: float
    tolerance: Tolerance

    @property
    def tokens(self) -> int:
        return len(self.all_tokens)

    @property
    def worst(self) -> tuple[Token, ...]:
        return self.all_tokens[:WORST]

    @property
    def largest(self) -> float:
        return self.worst[0].distance

    @property
    def agrees(self) -> bool:
        """Whether the difference can be rounding."""
        return self.mean <= self.tolerance.mean and self.largest <= self.tolerance.token

    def __str__(self) -> str:
        allowed = self.tolerance
        return (
            f"the log-probabilities of {self.tokens} tokens differ by {self.mean:.2g} on average "
            f"and by {self.largest:.2g} at most ({allowed.reason}, {allowed.mean:.2g} and "
            f"{allowed.token:.2g} are allowed), most at {self.worst[0]}"
        )


def draw_rows(
    vocabulary: int, length: int, count: int, seed: int, part: int = 0
) -> list[list[int]]:
    """`count` rows of `length` tokens of a vocabulary, without one twice as long as there are
    others: part after part all of them. The same for the same arguments.
    """
    random = torch.Generator().manual_seed(seed)
    order, size = torch.randperm(vocabulary, generator=random), length * count
    drawn = order[torch.arange(part * size, (part + 1) * size) % vocabulary]
    return [[int(token) for token in row] for row in drawn.view(count, length)]


def check_rows(rows: Rows) -> None:
    """ConfigError unless there are rows, and each has a token with one before it."""
    short = [number for number, row in enumerate(rows) if len(row) < 2]
    if short or not rows:
        what = f"row {short[0]} has {len(rows[short[0]])} tokens" if short else "there are no rows"
        raise ConfigError(
            f"{what}: give rows of at least 2 tokens, as a first one has no log-probability"
        )


def compare(rows: Rows, policy: Any, engine: Any, tolerance: Tolerance) -> EngineComparison:
    """RefitError unless both sides have a finite number for each token but the first of its row."""
    sides = {"policy": checked(rows, policy, "policy"), "engine": checked(rows, engine, "engine")}
    for side, answer in sides.items():
        for number, row in enumerate(answer):
            for position, value in enumerate(row, start=1):
                if not math.isfinite(value):
                    raise RefitError(
                        f"the {side} says {value} of token {rows[number][position]} at position "
                        f"{position} of row {number}: that is not a log-probability to compare"
                    )
    found = [
        Token(number, position, row[position], ours, theirs)
        for number, row in enumerate(rows)
        for position, (ours, theirs) in enumerate(
            zip(sides["policy"][number], sides["engine"][number], strict=True), start=1
        )
    ]
    mean = math.fsum(token.distance for token in found) / len(found)
    return EngineComparison(tuple(sorted(found, key=lambda t: -t.distance)), mean, tolerance)


def checked(rows: Rows, answer: Any, side: str) -> Logprobs:
    """The answer of a side; RefitError unless it has a number for each token but a row's first."""
    try:
        found = [[float(number) for number in row] for row in answer]
    except (TypeError, ValueError) as error:
        raise RefitError(f"the {side} has answered no log-probabilities: {error}") from error
    sizes, wanted = [len(row) for row in found], [len(row) - 1 for row in rows]
    if sizes != wanted:
        raise RefitError(
            f"the {side} has answered {len(sizes)} rows of {_several(sizes)} log-probabilities in "
            f"place of {len(wanted)} of {_several(wanted)}: one for each token but its row's first"
        )
    return found


def _several(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes[:4])) + (" + ..." if len(sizes) > 4 else "")
