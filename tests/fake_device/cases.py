"""The cases of the sweep, and of the faults that it has to find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.fake_device.layouts import DENSE, EXPERTS, Layout
from tests.fake_device.models import experts_of, fitted, published


@dataclass(frozen=True)
class Case:
    """One rank of one family under one layout, and what it runs; `fault` names what is planted."""

    family: str
    layout: Layout
    rank: int
    train: bool = True
    score: bool = False
    fault: str = ""

    @property
    def name(self) -> str:
        planted = f" with {self.fault}" if self.fault else ""
        return f"{self.family} {self.layout.name} {self.rank} of {self.layout.world}{planted}"


def cases() -> Iterator[Case]:
    """Every family under every layout. Of two ranks the first scores and the second trains."""
    for family, fields in published().items():
        for layout in EXPERTS if experts_of(fields) > 1 else DENSE:
            own = fitted(layout, fields)
            *first, last = own.ranks
            yield from (Case(family, own, rank, train=False, score=True) for rank in first)
            yield Case(family, own, last, score=own.score and not first)


def _planted(tp: int, fault: str) -> Case:
    return Case("glm4", Layout(f"tp{tp}", tp, tp=tp, packed=True), tp - 1, fault=fault)


FOUND = (_planted(8, "cpu_index"), _planted(8, "cpu_all_reduce"), _planted(8, "wrong_reshape"))
WAITING = tuple(_planted(2, fault) for fault in ("device_mask", "pageable_copy", "read_value"))
HIDDEN = _planted(2, "wrong_reshape")
"""The model has 32 query heads: two ranks have 16 each, eight ranks four."""
