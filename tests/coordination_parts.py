"""Parts that two ranks play in every primitive of `coordination`; one of the ranks suffers a fault
where it calls `suffer`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_policy.coordination import agreement
from megatron_policy.coordination.operation import (
    REFITS,
    SAVES,
    Coordinator,
    Operation,
    OperationKind,
)
from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.errors import BatchError, RefitError

LONG_S, HANG_S = 120.0, 600.0  # what must not time out; what hangs

Suffer = Callable[[], object]
Part = Callable[[Suffer], Any]
"""Plays a part to its end."""


@dataclass
class Place:
    """One of the two ranks, of which `culprit` suffers."""

    rank: int
    culprit: int
    timeout_s: float
    store: dist.Store
    coordinators: list[Coordinator] = field(default_factory=list)

    def coordinator(self, kind: OperationKind) -> Coordinator:
        """A new coordinator."""
        self.coordinators.append(Coordinator.of_all_ranks(kind, LONG_S))
        return self.coordinators[-1]

    def group(self, name: str) -> BoundedProcessGroup:
        """A new group."""
        self.store.set(f"here/{name}/{self.rank}", "")
        # Its timeout is short from the beginning, and is not to cover the start of the other rank.
        self.store.wait([f"here/{name}/{rank}" for rank in (0, 1)])
        return BoundedProcessGroup(name, self.store, self.rank, 2, self.timeout_s)

    def set_timeouts(self, timeout_s: float) -> None:
        """The timeout of all that is yet to begin; it is long until this is called."""
        for coordinator in self.coordinators:
            coordinator.timeout_s = timeout_s


Maker = Callable[[Place], Part]
"""Makes ready for a part: what it needs of the other rank is there then."""


def in_a_save(play: Callable[[Place, Operation, Suffer], Any]) -> Maker:
    """A part that a new coordinator's next operation plays."""

    @wraps(play)
    def make(place: Place) -> Part:
        coordinator = place.coordinator(SAVES)
        return lambda suffer: play(place, coordinator.begin("save"), suffer)

    return make


@in_a_save
def operation_wait_for_all(_: Place, operation: Operation, suffer: Suffer) -> str:
    with operation.critical_section("written"):
        suffer()
    operation.wait_for_all("written")
    return "all have written"


@in_a_save
def operation_wait_for(place: Place, operation: Operation, suffer: Suffer) -> str:
    with operation.critical_section():
        suffer()
        if place.rank == place.culprit:
            operation.publish("where", "here")
    return operation.wait_for("where")


@in_a_save
def operation_check_same(_: Place, operation: Operation, suffer: Suffer) -> str:
    def check() -> None:
        suffer()
        operation.check_same("value", "a save", "found {own}, the other {first}")

    operation.run_together("found", check)
    return "all have found the same"


def operation_leave_together(place: Place) -> Part:
    coordinator = place.coordinator(SAVES)

    def play(suffer: Suffer) -> str:
        operation = coordinator.begin("save")
        with operation.critical_section():
            suffer()
        with logged_here() as words:
            operation.leave_together()
        assert coordinator.lost_a_rank == bool(words)
        return "".join(words)

    return play


@contextmanager
def logged_here() -> Iterator[list[str]]:
    """What this thread's operations log."""
    words: list[str] = []
    log, own = logging.getLogger(Operation.__module__), threading.get_ident()
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.thread == own)
    log.addHandler(handler)
    try:
        yield words
    finally:
        log.removeHandler(handler)


def in_a_refit(play: Callable[[Place, Operation], Any]) -> Maker:
    """A part that a new coordinator's next operation plays after what can fail on a rank; it aborts
    there.
    """

    @wraps(play)
    def make(place: Place) -> Part:
        coordinator = place.coordinator(REFITS)
        coordinator.begin().broadcast("both are here" if place.rank == 0 else None)

        def part(suffer: Suffer) -> Any:
            operation = coordinator.begin()
            try:
                suffer()
            except RuntimeError as error:
                operation.abort(error)
                raise
            return play(place, operation)

        return part

    return make


@in_a_refit
def refit_gather(place: Place, operation: Operation) -> str:
    parts = operation.gather(f"of rank {place.rank}")
    return operation.broadcast(", ".join(parts) if place.rank == 0 else None)


@in_a_refit
def refit_broadcast(place: Place, operation: Operation) -> str:
    return operation.broadcast("words" if place.rank == place.culprit else None)


@in_a_refit
def refit_shut_down(_: Place, operation: Operation) -> str:
    operation._coordinator.shut_down()
    return "down"


def refit_collect_failures(place: Place) -> Part:
    coordinator = place.coordinator(REFITS)
    coordinator.begin().broadcast("both are here" if place.rank == 0 else None)

    def play(suffer: Suffer) -> str:
        operation, failure = coordinator.begin(), None
        try:
            suffer()
        except RuntimeError as error:
            failure = error
        reasons = operation.collect_failures(failure)
        operation.leave_together()
        if reasons:
            raise RefitError(reasons)
        return "all have succeeded"

    return play


def in_a_group(play: Callable[[Place, BoundedProcessGroup], Tensor]) -> Maker:
    """A part that a new group plays after what can fail on a rank; it leaves the group there."""

    @wraps(play)
    def make(place: Place) -> Part:
        group = place.group(play.__name__)

        def part(suffer: Suffer) -> list[int]:
            try:
                suffer()
            except RuntimeError:
                group.close(broken=True)
                raise
            numbers: list[int] = play(place, group).tolist()
            return numbers

        return part

    return make


@in_a_group
def group_broadcast(place: Place, group: BoundedProcessGroup) -> Tensor:
    memory = torch.full((3,), 10**place.rank)
    group.broadcast(memory, place.culprit).wait()
    return memory


@in_a_group
def group_all_gather(place: Place, group: BoundedProcessGroup) -> Tensor:
    memory = torch.full((2,), 10**place.rank)
    group.all_gather(memory).wait()
    return memory


@in_a_group
def group_sum(place: Place, group: BoundedProcessGroup) -> Tensor:
    memory = torch.full((3,), 10**place.rank)
    group.sum(memory).wait()
    return memory


def agreement_prepare_together(place: Place) -> Part:
    group = dist.new_group([0, 1], timedelta(seconds=place.timeout_s), "gloo")
    assert group is not None
    agreement.find_largest([0], group)  # its connections exist

    def play(suffer: Suffer) -> list[int]:
        _, most = agreement.prepare_together(
            suffer, lambda _: [10**place.rank, -(10**place.rank)], group, BatchError("elsewhere")
        )
        return [*most, *agreement.gather_lists([10**place.rank], group)]

    return play


SAVING = (
    operation_wait_for_all,
    operation_wait_for,
    operation_check_same,
    operation_leave_together,
)
REFITTING = (
    refit_gather,
    refit_collect_failures,
    refit_broadcast,
    refit_shut_down,
)
GROUPS = (group_broadcast, group_all_gather, group_sum)
AGREEMENTS = (agreement_prepare_together,)
REPEATED = (operation_wait_for_all, refit_gather, refit_collect_failures)
"""These go on after a fault: their next operation succeeds."""
