"""Parts that two ranks play in every primitive of `coordination`; one of the ranks suffers a fault
where it calls `suffer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_policy.coordination import agreement
from megatron_policy.coordination.barrier import CollectiveOperation, Coordinator
from megatron_policy.coordination.collectives import BoundedCollectives
from megatron_policy.coordination.departure import Departure
from megatron_policy.coordination.first_failure import FirstFailure
from megatron_policy.coordination.heartbeat import Heartbeat
from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.coordination.store import StoreCalls
from megatron_policy.errors import BatchError, CheckpointError
from megatron_policy.parallel.topology import Topology

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
    collectives: list[BoundedCollectives] = field(default_factory=list)

    def coordinator(self) -> Coordinator:
        """A new coordinator."""
        self.coordinators.append(Coordinator(self.store, self.rank, 2, LONG_S))
        return self.coordinators[-1]

    def joined(self) -> BoundedCollectives:
        """New collectives, whose groups exist."""
        topology, device = Topology(dp=2), torch.device("cpu")
        coords = topology.coords(self.rank)
        self.collectives.append(BoundedCollectives(topology, coords, LONG_S, device))
        self.collectives[-1].begin()
        self.collectives[-1].sum(torch.ones(1, dtype=torch.int64))
        return self.collectives[-1]

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
        for collectives in self.collectives:
            collectives._timeout_s = collectives._call._timeout_s = timeout_s


Maker = Callable[[Place], Part]
"""Makes ready for a part: what it needs of the other rank is there then."""


def in_an_operation(play: Callable[[Place, CollectiveOperation, Suffer], Any]) -> Maker:
    """A part that a new coordinator's next operation plays."""

    @wraps(play)
    def make(place: Place) -> Part:
        coordinator = place.coordinator()
        return lambda suffer: play(place, coordinator.begin("save"), suffer)

    return make


@in_an_operation
def operation_wait_for_all(_: Place, operation: CollectiveOperation, suffer: Suffer) -> str:
    with operation.critical_section("written"):
        suffer()
    operation.wait_for_all("written")
    return "all have written"


@in_an_operation
def operation_wait_for(place: Place, operation: CollectiveOperation, suffer: Suffer) -> str:
    with operation.critical_section():
        suffer()
        if place.rank == place.culprit:
            operation.publish("where", "here")
    return operation.wait_for("where")


@in_an_operation
def operation_check_same_value(_: Place, operation: CollectiveOperation, suffer: Suffer) -> str:
    with operation.critical_section("found"):
        suffer()
        operation.check_same_value("a save")
    operation.wait_for_all("found")
    return "all have found the same"


def operation_leave_together(place: Place) -> Part:
    coordinator = place.coordinator()

    def play(suffer: Suffer) -> bool:
        operation = coordinator.begin("save")
        with operation.critical_section():
            suffer()
        operation.leave_together()
        return coordinator.lost_a_rank

    return play


def departure(place: Place) -> Part:
    call = StoreCalls(place.timeout_s, CheckpointError)
    heartbeat = Heartbeat(
        lambda by: call(lambda: place.store.add("departure/beats", by)), place.timeout_s
    )
    leaving = Departure(place.store, "departure", place.rank, 2, call, heartbeat)
    first = FirstFailure(place.store, "departure/failed", call)

    def play(suffer: Suffer) -> str:
        try:
            suffer()
        except RuntimeError as error:
            first.publish(f"rank {place.rank}: {error}")
            raise
        return leaving.leave_together(place.timeout_s, first.read)

    return play


def in_a_refit(play: Callable[[Place, BoundedCollectives], Any]) -> Maker:
    """A part that new collectives play after what can fail on a rank; it aborts there."""

    @wraps(play)
    def make(place: Place) -> Part:
        collectives = place.joined()

        def part(suffer: Suffer) -> Any:
            collectives.begin()
            try:
                suffer()
            except RuntimeError as error:
                collectives.abort(error)
                raise
            return play(place, collectives)

        return part

    return make


@in_a_refit
def collectives_sum(place: Place, collectives: BoundedCollectives) -> int:
    numbers = torch.tensor([10**place.rank])
    collectives.sum(numbers)
    return int(numbers)


@in_a_refit
def collectives_messages(place: Place, collectives: BoundedCollectives) -> str:
    if place.rank == place.culprit:
        collectives.messages.publish("name", "words")
    collectives.sum(torch.zeros(1, dtype=torch.int64))
    return collectives.messages.read("name")


@in_a_refit
def collectives_leave_together(_: Place, collectives: BoundedCollectives) -> str:
    collectives.leave_together()
    return "done"


@in_a_refit
def collectives_shut_down(_: Place, collectives: BoundedCollectives) -> str:
    collectives.shut_down()
    return "down"


def collectives_check_all_succeeded(place: Place) -> Part:
    collectives = place.joined()

    def play(suffer: Suffer) -> str:
        collectives.begin()
        failure = None
        try:
            suffer()
        except RuntimeError as error:
            failure = error
        collectives.check_all_succeeded(failure)
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


def agreement_prepared_together(place: Place) -> Part:
    group = dist.new_group([0, 1], timedelta(seconds=place.timeout_s), "gloo")
    assert group is not None
    agreement.largest([0], group)  # its connections exist

    def play(suffer: Suffer) -> list[int]:
        _, most = agreement.prepared_together(
            suffer, lambda _: [10**place.rank, -(10**place.rank)], group, BatchError("elsewhere")
        )
        return [*most, *agreement.gathered([10**place.rank], group)]

    return play


OPERATIONS = (
    operation_wait_for_all,
    operation_wait_for,
    operation_check_same_value,
    operation_leave_together,
    departure,
)
COLLECTIVES = (
    collectives_sum,
    collectives_check_all_succeeded,
    collectives_messages,
    collectives_leave_together,
    collectives_shut_down,
)
GROUPS = (group_broadcast, group_all_gather, group_sum)
AGREEMENTS = (agreement_prepared_together,)
REPEATED = (operation_wait_for_all, collectives_sum, collectives_check_all_succeeded)
"""These go on after a fault: their next operation succeeds."""
