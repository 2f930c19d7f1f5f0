"""The multiples that lengths are rounded up to so that a layout can split them."""

from __future__ import annotations

import math
from dataclasses import dataclass

NARROWEST = 2
"""The fewest positions that a microbatch keeps of a wider batch: losses look at pairs of tokens,
and one that takes extrema over them fails if there is none.
"""


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not less than `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Multiples:
    """Multiples of a whole row of positions, and of each sequence in a packed row."""

    row: int
    sequence: int
    context_ranks: int

    @classmethod
    def of(cls, wanted: int, tp: int, cp: int, sequence_parallel: bool) -> Multiples:
        """`wanted` is the multiple that the caller asks for in whole rows."""
        zigzag = 2 * cp if cp > 1 else 1
        shares = cp * tp if sequence_parallel else 1
        return cls(row=math.lcm(wanted, zigzag, shares), sequence=zigzag, context_ranks=cp)
