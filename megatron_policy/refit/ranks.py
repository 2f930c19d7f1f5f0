"""How the ranks of a policy take part in refits: operations that fail on all of them together, and
the process groups over which they exchange weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from megatron_policy.coordination.operation import REFITS, Coordinator
from megatron_policy.coordination.process_group import ProcessGroups
from megatron_policy.errors import RefitError
from megatron_policy.parallel.topology import Coords, Topology

T = TypeVar("T")


class RefitRanks:
    """This rank's end. Collectives use groups of refits' own, made at their first use. If one of
    them fails, all ranks abandon the groups and make new ones for the next refit.
    """

    def __init__(
        self, topology: Topology, coords: Coords, timeout_s: float, *, on_host: bool = False
    ) -> None:
        """`on_host` is for weights in host memory."""
        self.topology, self.coords, self.timeout_s = topology, coords, timeout_s
        self.rank = topology.rank(coords)
        self._coordinator = Coordinator.of_all_ranks(REFITS, timeout_s)
        self._operation = self._coordinator.begin()
        self._groups: ProcessGroups | None = None
        self._calls, self._on_host = 0, on_host

    @property
    def calls(self) -> int:
        """Number of collective calls by this rank so far."""
        return self._calls + (self._groups.calls if self._groups else 0)

    def apart(self) -> RefitRanks:
        """The same ranks, with operations and groups of their own, for weights in host memory: what
        one thread does with them meets nothing of what another does with these. Collective.
        """
        return RefitRanks(self.topology, self.coords, self.timeout_s, on_host=True)

    def begin(self) -> None:
        """Begin an operation of all ranks, which count them alike: one that comes late to an
        operation which has failed does not meet the others in the next.
        """
        before, self._operation = self._operation, self._coordinator.begin()
        if self._groups is not None and before.first_failure(self._operation.call):
            self._leave_groups(broken=True)  # this rank was not there when the others gave up

    def agree(self, failure: Exception | None) -> None:
        """End an operation, collectively: RefitError on all ranks, with reasons, if any failed."""
        with self._giving_up():
            reasons = self._operation.collect_failures(failure)
        self._operation.leave_together()
        if reasons:
            raise RefitError(reasons) from failure

    def broadcast_text(self, words: str | None) -> str:
        """The words that rank 0 passes. Collective over all ranks; the others pass None."""
        with self._giving_up():
            return self._operation.broadcast(words)

    def gather_text(self, words: str) -> list[str]:
        """On rank 0 the words that each rank passes; nothing on the others. Collective."""
        with self._giving_up():
            return self._operation.gather(words)

    def leave_together(self) -> None:
        """End an operation that `agree` does not end."""
        self._operation.leave_together()

    def alive(self) -> AbstractContextManager[None]:
        """Send heartbeats to the other ranks while the body waits for an engine or a disk."""
        return self._operation.beating()

    def join_groups(self) -> ProcessGroups:
        """The groups for exchanges of this operation. RefitError if others have given it up, or do
        not come in time.
        """
        operation, coordinator = self._operation, self._coordinator
        if reason := operation.first_failure():
            raise RefitError(f"the other ranks have already aborted: {reason}")
        if self._groups is None:
            name = f"{coordinator.root}/{operation.number}"

            def join() -> ProcessGroups:
                # A connection of its own, which is waited for too: a rank that is lost can leave
                # others waiting in it.
                at, store = (self.topology, self.coords), coordinator.copy_store()
                return ProcessGroups.join(name, store, *at, self.timeout_s, on_host=self._on_host)

            self._groups = operation.call(join, coordinator.check_lost)
        return self._groups

    def watch(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield the steps of an exchange with a heartbeat after each; the others hear of a failure
        in them.
        """
        with self._giving_up():
            try:
                for step in steps:
                    yield step
                    self._operation.beat()
            except BaseException as error:
                # Also if the caller stops early: the others are in the middle of an exchange.
                self._operation.abort(error)
                raise

    def leave(self) -> None:
        """Call before `close` if nothing failed: rank 0 leaves after the others."""
        self._coordinator.shut_down()

    def close(self) -> None:
        """Leave the groups."""
        self._leave_groups()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Leave the groups if the body fails: calls can still be under way in them."""
        try:
            yield
        except BaseException:
            self._leave_groups(broken=True)
            raise

    def _leave_groups(self, broken: bool = False) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            self._calls += groups.calls
            groups.close(broken)
