"""Collectives of the ranks of a policy for a refit: bounded in time, failing on all ranks together,
over process groups that are made anew after a failure.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_policy.coordination.departure import SHUTDOWN_S, Departure
from megatron_policy.coordination.first_failure import FirstFailure
from megatron_policy.coordination.heartbeat import Heartbeat
from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.coordination.rank_messages import RankMessages
from megatron_policy.coordination.store import StoreCalls
from megatron_policy.errors import RefitError
from megatron_policy.parallel.topology import Coords, Topology

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 0.05  # between two looks for a key


@dataclass(frozen=True)
class ProcessGroups:
    """A rank's groups for refits: its tensor-parallel peers, the ranks that hold a layer's experts
    between them, its pipeline peers, all ranks.
    """

    tp: BoundedProcessGroup
    experts: BoundedProcessGroup
    pp: BoundedProcessGroup
    world: BoundedProcessGroup

    @property
    def calls(self) -> int:
        """Collective calls over them so far."""
        return sum(group.calls for group in self._all)

    def close(self, broken: bool = False) -> None:
        """Leave them."""
        for group in self._all:
            group.close(broken)

    @property
    def _all(self) -> tuple[BoundedProcessGroup, ...]:
        return (self.tp, self.experts, self.pp, self.world)


class BoundedCollectives:
    """One rank's part in the operations that all ranks carry out together, one after another.

    Process groups are made at their first use. A rank that fails aborts the operation: it publishes
    the reason in the store of the ranks and leaves its groups. The others find a broken connection
    or the reason, and the next operation makes new groups: an epoch begins.
    """

    def __init__(
        self, topology: Topology, coords: Coords, timeout_s: float, device: torch.device
    ) -> None:
        """No wait is longer than `timeout_s` seconds without a heartbeat."""
        self.rank = topology.rank(coords)
        self._topology, self._coords = topology, coords
        self._timeout_s, self._device = timeout_s, device
        self._groups: ProcessGroups | None = None
        self._epoch = self._number = self._calls = 0
        self._left: list[str] = []
        self._call = StoreCalls(timeout_s, RefitError)
        # The store can outlive a policy: the next policy's keys must be new to it.
        self._root = f"refit/{self._call(lambda: self.store.add(f'refit/of rank {self.rank}', 1))}"
        self.messages = RankMessages(self.store, self._root, self.rank, self._call)
        self.heartbeat = Heartbeat(
            lambda by: self._call(lambda: self.store.add(f"{self._root}/beats", by)), timeout_s
        )

    @property
    def store(self) -> dist.Store:
        """The store that torch made for the ranks."""
        return dist.distributed_c10d._get_default_store()

    @property
    def calls(self) -> int:
        """Collective calls of this rank so far."""
        return self._calls + (self._groups.calls if self._groups else 0)

    def begin(self) -> None:
        """Begin the next operation. The ranks count operations alike, so that a rank which comes
        late to an aborted one does not meet the others in the next.
        """
        self._call.reset()
        if self.rank == 0:
            for key in self._left:  # nothing waits for these any more
                self._call(partial(self.store.delete_key, key))
        self._number, self._left = self._number + 1, []

    def groups(self) -> ProcessGroups:
        """The groups of this epoch; RefitError if a rank does not come in time, or has aborted."""
        while aborted := self._aborted():
            number, reason = aborted
            if number >= self._number:
                raise RefitError(f"the other ranks have already aborted: {reason}")
            self._leave(broken=True)  # this rank was not there when they gave up
            self._epoch += 1
        if self._groups is None:
            self._groups = self._call(self._joined)
        return self._groups

    def sum(self, numbers: Tensor) -> None:
        """Add up int64 numbers over all ranks, in place. Waits while other ranks beat; otherwise
        RefitError with the reason of the rank that aborted first.
        """
        if self._topology.world_size == 1:
            return
        try:
            world = self.groups().world
            self._all_here(numbers.numel())
            world.sum(numbers).wait()
            # The sum can complete here although another rank aborted after it had sent its part.
            aborted = self._aborted()
            if aborted is not None:
                raise RefitError(aborted[1])
        except RefitError as error:
            first = self.abort(error)
            raise (RefitError(first) if first else error) from error

    def check_all_succeeded(self, failure: Exception | None) -> None:
        """End an operation, collectively: RefitError on all ranks, with reasons, if any failed."""
        failed = torch.zeros(self._topology.world_size, dtype=torch.int64, device=self._device)
        failed[self.rank] = failure is not None
        try:
            if failure is not None:
                self.messages.publish_failure(failure_message(failure))
            self.sum(failed)
        except RefitError as error:
            raise (RefitError(failure_message(failure)) if failure else error) from error
        ranks = [rank for rank, flag in enumerate(failed.tolist()) if flag]
        reasons = self.messages.failures(ranks) if ranks else ""
        self.leave_together()
        if ranks:
            raise RefitError(reasons) from failure

    def leave_together(self) -> None:
        """Return when all ranks are done and none needs another any more. RefitError with the
        reason if a rank aborted meanwhile.
        """
        departure = self._departure(self._number)
        why = departure.leave_together(self._timeout_s, self._abort_reason)
        if why and not self._call.failure and self._aborted():
            self._leave(broken=True)
            raise RefitError(why)
        if why:  # the operation has succeeded all the same
            _log.warning("done here, but a rank may not know that all are: %s", why)

    def abort(self, error: BaseException) -> str:
        """Leave the groups, in which calls can still be under way, and publish why. Return the
        reason of the rank that aborted first; empty if it is this one.
        """
        said = f"{self._number} rank {self.rank}: {failure_message(error)}"
        try:
            first = self._first_failure().publish(said)
        finally:
            self._leave(broken=True)
        return "" if first == said else _parsed(first)[1]

    def shut_down(self) -> None:
        """No operation follows and no rank has failed: rank 0 leaves after the others."""
        timeout_s = min(self._timeout_s, SHUTDOWN_S)
        departure = replace(self._departure("leaving"), call=StoreCalls(timeout_s, RefitError))
        with suppress(RefitError):  # a rank that is gone needs nothing
            departure.shut_down(timeout_s, self._abort_reason)

    def close(self) -> None:
        """Leave the groups."""
        self._leave()

    def _departure(self, what: object) -> Departure:
        root, size = f"{self._root}/{what}", self._topology.world_size
        return Departure(self.store, root, self.rank, size, self._call, self.heartbeat)

    def _joined(self) -> ProcessGroups:
        at, size = self._coords, self._topology
        of_experts = size.expert_coords(self.rank)

        def group(name: str, rank: int, count: int) -> BoundedProcessGroup:
            where = f"{self._root}/{self._epoch}/{name}"
            return BoundedProcessGroup(where, self.store, rank, count, self._timeout_s)

        return ProcessGroups(
            tp=group(f"tp/{at.pp}.{at.dp}.{at.cp}", at.tp, size.tp),
            experts=group(
                f"experts/{at.pp}.{of_experts.edp}",
                of_experts.ep * size.expert_tp + of_experts.etp,
                size.ep * size.expert_tp if size.experts_apart else 1,
            ),
            pp=group(f"pp/{at.dp}.{at.cp}.{at.tp}", at.pp, size.pp),
            world=group("world", self.rank, size.world_size),
        )

    def _all_here(self, count: int) -> None:
        """Wait, while ranks beat, until every rank is at its next sum, of `count` numbers. A rank
        that is at another sum does not come, and must not meet these.
        """
        arrived, everybody = self._keys(count)
        self._left += [arrived, everybody]
        if self._call(lambda: self.store.add(arrived, 1)) == self._topology.world_size:
            self._call(lambda: self.store.set(everybody, ""))

        def over() -> bool:
            # Not the store's own wait: it logs a warning at every timeout.
            come = self._call(lambda: self.store.check([everybody]))
            return come or self._aborted() is not None

        if not self.heartbeat.wait_while_alive(over, self._timeout_s, _LONGEST_PAUSE_S):
            raise RefitError(
                f"a rank did not take part within {self._timeout_s:g} s. Check its log; the "
                "next refit starts from scratch"
            )
        if aborted := self._aborted():
            raise RefitError(aborted[1])

    def _keys(self, count: int) -> tuple[str, str]:
        end = f"{self._number}/{len(self._left)}/{count}"
        return f"{self._root}/arrived/{end}", f"{self._root}/everybody/{end}"

    def _leave(self, broken: bool = False) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            self._calls += groups.calls
            groups.close(broken)

    def _aborted(self) -> tuple[int, str] | None:
        """In which operation this epoch was aborted, and by whom and why; None if it was not."""
        said = self._first_failure().read()
        return _parsed(said) if said else None

    def _abort_reason(self) -> str:
        """By whom and why this epoch was aborted; empty if it was not."""
        return (self._aborted() or (0, ""))[1]

    def _first_failure(self) -> FirstFailure:
        return FirstFailure(self.store, f"{self._root}/aborted/{self._epoch}", self._call)


def _parsed(aborted: str) -> tuple[int, str]:
    """The operation, and the rank and its reason, that `abort` has published."""
    number, _, words = aborted.partition(" ")
    return int(number), words


def failure_message(failure: BaseException) -> str:
    """A failure, in words for the other ranks."""
    if isinstance(failure, RefitError):
        return str(failure)
    if isinstance(failure, GeneratorExit):
        return "it was left before its last tensor"
    return f"{type(failure).__name__}: {failure}"
