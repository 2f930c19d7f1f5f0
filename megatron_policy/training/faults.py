"""Makes all ranks raise the same error for a loss that one of them could not train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from megatron_policy.coordination.agreement import find_largest, gather_lists
from megatron_policy.errors import LossError
from megatron_policy.parallel.groups import Groups

_NAMED = 4
_ROWS = 8


@dataclass(frozen=True, order=True)
class Fault:
    """A microbatch that cannot be trained on, in global batch `batch` of a call, on data-parallel
    rank `replica`; `rows` number its rows in that replica's data, or in the driver's. `what` says
    in words what is wrong, `trace` where the loss raised.
    """

    batch: int
    replica: int
    microbatch: int
    rows: tuple[int, ...]
    what: str
    trace: str = ""

    def where(self) -> str:
        """The location, for an error message."""
        first = ", ".join(map(str, self.rows[:_ROWS]))
        rows = f"{first}, ..." if len(self.rows) > _ROWS else first
        return (
            f"in microbatch {self.microbatch} of global batch {self.batch} on data-parallel "
            f"replica {self.replica} (rows {rows})"
        )


def any_fault(faults: Sequence[Fault], groups: Groups) -> bool:
    """Whether any rank has a fault; all stages of a pipeline have the same faults."""
    found = int(bool(faults))
    for group in _groups(groups):
        (found,) = find_largest([found], group)
    return bool(found)


def raise_everywhere(faults: Sequence[Fault], groups: Groups, consequence: str) -> NoReturn:
    """Raise the same LossError on every rank: what is wrong, where, and the `consequence`.
    Collective.
    """
    found = list(faults)
    for group in _groups(groups):
        found = gather_lists(found, group)
    several = sorted(set(found))
    first = several[0]
    error = LossError(f"{_said(several)} {consequence}")
    if first.trace:
        error.add_note(first.trace)
    raise error


def _groups(groups: Groups) -> list[dist.ProcessGroup]:
    """Groups that together connect all ranks of one stage."""
    return [group for group in (groups.tp, groups.dp_cp) if group.size() > 1]


def _said(faults: Sequence[Fault]) -> str:
    """Each thing that is wrong once, with the first place, and how many others have it too."""
    places: dict[str, list[Fault]] = {}
    for fault in faults:
        places.setdefault(fault.what, []).append(fault)
    named = []
    for what, alike in list(places.items())[: _NAMED + 1]:
        more = f", and so in {len(alike) - 1} more" if alike[1:] else ""
        named.append(f"{what.rstrip('.')}. This is {alike[0].where()}{more}.")
    left = len(places) - len(named)
    return f"{' Also: '.join(named)}{f' Also: {left} more.' if left else ''}"
