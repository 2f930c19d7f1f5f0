"""Makes all ranks raise the same error for a loss that one of them could not train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from megatron_policy.coordination.agreement import gathered, largest
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
        (found,) = largest([found], group)
    return bool(found)


def raise_everywhere(faults: Sequence[Fault], groups: Groups, consequence: str) -> NoReturn:
    """Raise the same LossError on every rank: what is wrong, where, and the `consequence`.
    Collective.
    """
    found = list(faults)
    for group in _groups(groups):
        found = gathered(found, group)
    several = sorted(set(found))
    first = several[0]
    error = LossError(f"{first.what} {first.where()}.{_others(several[1:])} {consequence}")
    if first.trace:
        error.add_note(first.trace)
    raise error


def _groups(groups: Groups) -> list[dist.ProcessGroup]:
    """Groups that together connect all ranks of one stage."""
    return [group for group in (groups.tp, groups.dp_cp) if group.size() > 1]


def _others(faults: Sequence[Fault]) -> str:
    if not faults:
        return ""
    named = "; ".join(f"{fault.what} {fault.where()}" for fault in faults[:_NAMED])
    more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
    return f" Also: {named}{more}."
