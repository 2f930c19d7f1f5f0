"""What makes a loss impossible to train on, and how all ranks raise it together."""

from __future__ import annotations

import functools
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_policy.coordination.agreement import find_largest, gather_lists
from megatron_policy.errors import LossError
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.parallel.groups import Groups

_NAMED, _ROWS, _FRAMES = 4, 8, 20
_OURS = __name__.partition(".")[0]
_LIBRARIES = {_OURS, "torch", "numpy", *sys.stdlib_module_names}
"""Packages in which no caller's code is."""


@dataclass(frozen=True, order=True, kw_only=True)
class LossFault:
    """A microbatch that cannot be trained on, in global batch `batch` of a call, on data-parallel
    rank `replica`; `rows` number its rows in that replica's data, or in the driver's. `what` says
    in words what is wrong, `trace` where the loss raised.
    """

    batch: int = 0
    replica: int = 0
    microbatch: int = 0
    rows: tuple[int, ...] = ()
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


def locate_faults(
    engine: TrainingEngine,
    microbatches: Sequence[Microbatch],
    faults: Sequence[Iterable[LossFault]],
    batch: int = 0,
) -> list[LossFault]:
    """The faults of each of these microbatches that is not a dummy, with its place in the
    `batch`-th global batch of a call.
    """
    rows = [each.rows for each in microbatches if not each.dummy]
    replica = engine.groups.dp.rank()
    return [
        replace(fault, batch=batch, replica=replica, microbatch=number, rows=rows[number])
        for number, several in enumerate(faults)
        for fault in several
    ]


def raise_faults(
    engine: TrainingEngine,
    microbatches: Sequence[Microbatch],
    faults: Sequence[Iterable[LossFault]],
    consequence: str,
) -> None:
    """LossError on every rank if a microbatch of any has faults, which the last stage knows."""
    found = locate_faults(engine, microbatches, faults)
    found = engine.share_object(found if engine.is_last_stage else None)
    if any_fault(found, engine.groups):
        raise_everywhere(found, engine.groups, consequence)


def any_fault(faults: Sequence[LossFault], groups: Groups) -> bool:
    """Whether any rank has a fault; all stages of a pipeline have the same faults."""
    found = int(bool(faults))
    for group in _stage_groups(groups):
        (found,) = find_largest([found], group)
    return bool(found)


def raise_everywhere(faults: Iterable[LossFault], groups: Groups, consequence: str) -> NoReturn:
    """LossError on every rank: what is wrong, where, and the `consequence`. Each thing that is
    wrong is said once, with the first place, and how many others have it too. Collective.
    """
    found = list(faults)
    for group in _stage_groups(groups):
        found = gather_lists(found, group)
    found = sorted(set(found))
    places: dict[str, list[LossFault]] = {}
    for fault in found:
        places.setdefault(fault.what, []).append(fault)
    sentences = []
    for what, alike in list(places.items())[: _NAMED + 1]:
        more = f", and so in {len(alike) - 1} more" if alike[1:] else ""
        sentences.append(f"{what.rstrip('.')}. This is {alike[0].where()}{more}.")
    if len(places) > len(sentences):
        sentences.append(f"{len(places) - len(sentences)} more.")
    error = LossError(f"{' Also: '.join(sentences)} {consequence}")
    if found[0].trace:
        error.add_note(found[0].trace)
    raise error


def _stage_groups(groups: Groups) -> list[dist.ProcessGroup]:
    """Groups that together connect all ranks of one stage."""
    return [group for group in (groups.tp, groups.dp_cp) if group.size() > 1]


def name_of(loss_fn: Callable[..., Any]) -> str:
    """The name of a loss in messages."""
    return str(getattr(loss_fn, "__name__", None) or type(loss_fn).__name__)


def check_finite(loss_fn: Callable[..., object], value: float) -> list[LossFault]:
    """What is wrong with the value of a loss; nothing if it is finite."""
    if math.isfinite(value):
        return []
    return [LossFault(what=f"{name_of(loss_fn)} returned {value}, which is not finite")]


def fault_of_exception(called: Callable[..., Any], error: Exception) -> LossFault:
    """What went wrong in a function of the caller's: its own frames, and the innermost line of them
    that is in no library.
    """
    # A function, a method, a partial of one, or an object that can be called.
    function: Any = called
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    frames = list(traceback.walk_tb(error.__traceback__))
    below = list(dropwhile(lambda each: each[0].f_code is not code, frames))
    if not below:
        below = list(dropwhile(lambda each: _package_of(each[0]) == _OURS, frames))
    at = ""
    if below:
        own = [each for each in below if _package_of(each[0]) not in _LIBRARIES] or below
        frame, line = own[-1]
        file = Path(frame.f_code.co_filename).name
        at = f" ({file}, line {line}, in {frame.f_code.co_name})"
    name = name_of(called)
    listed = traceback.StackSummary.extract(iter(below[-_FRAMES:]))
    parts = [f"{name} raised:\n", *listed.format(), *traceback.format_exception_only(error)]
    text = str(error).strip() or "without a message"
    what = f"{name} raised {type(error).__name__}: {text}{at}"
    return LossFault(what=what, trace="".join(parts).rstrip())


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
