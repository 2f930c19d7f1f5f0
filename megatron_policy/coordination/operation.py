"""Operations that all ranks of a policy carry out together and that fail on all of them together:
saves, loads, refits, moves of memory. They use the store of the ranks, no collectives, so that a
background thread can run one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from megatron_policy.coordination.lost_ranks import watch_ranks
from megatron_policy.coordination.store import Heartbeat, OperationValues, StoreCalls
from megatron_policy.errors import CheckpointError, ConfigError, RefitError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_ALL, _GIVEN_UP = "all", "given up"
"""What a barrier says: all ranks have arrived, or one gave up waiting before they had."""
_WORDS = "words: "
"""Precedes a message: to the store an empty value is none, which another rank could replace."""
_SHOWN_REASONS = 3
_SHUTDOWN_S = 30.0
"""How long rank 0 waits for the others when it shuts down."""


@dataclass(frozen=True)
class OperationKind:
    """How operations of one kind fail."""

    name: str
    error: type[CheckpointError] | type[RefitError]
    describe_silence: Callable[[float, str], str]
    """What a rank raises after that many seconds in which it waited for what has that name."""
    longest_pause_s: float
    """Between two looks at the store."""

    def describe(self, error: BaseException) -> str:
        """A failure, in words for the other ranks."""
        if isinstance(error, self.error):
            return str(error)
        if isinstance(error, GeneratorExit):
            return "it was left before its last tensor"
        if self.error is CheckpointError:
            if isinstance(error, OSError) and error.filename:
                return f"{error.filename}: {error.strerror}"
            if isinstance(error, RuntimeError | ValueError) and str(error):
                return str(error)
        return f"{type(error).__name__}: {error}"

    def wrap(self, error: BaseException) -> CheckpointError | RefitError:
        """The error itself, or one of this kind with its description."""
        return error if isinstance(error, self.error) else self.error(self.describe(error))


SAVES = OperationKind(
    "save",
    CheckpointError,
    lambda timeout_s, name: (
        f"a rank gave no sign of life for {timeout_s:g} s while the others waited for {name!r}. "
        "Check its log; checkpoint_timeout_s sets how long to wait"
    ),
    longest_pause_s=0.1,
)
REFITS = OperationKind(
    "refit",
    RefitError,
    lambda timeout_s, name: (
        f"a rank did not take part within {timeout_s:g} s. Check its log; the next refit starts "
        "from scratch"
    ),
    longest_pause_s=0.05,
)


class Coordinator:
    """One rank's part in the operations of a kind: every rank begins the same ones in the same
    order.
    """

    @classmethod
    def of_all_ranks(cls, kind: OperationKind, timeout_s: float) -> Coordinator:
        """That of the default process group, whose ranks hear at once of one that has died."""
        group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
        assert group is not None, "a policy's ranks have a process group"
        own = cls(kind, store, group.rank(), group.size(), timeout_s)
        if own.size > 1:
            own.find_lost = StoreCalls(timeout_s, kind.error)(lambda: watch_ranks(group, store))
        return own

    def __init__(
        self, kind: OperationKind, store: dist.Store, rank: int, size: int, timeout_s: float
    ) -> None:
        """No wait is longer than `timeout_s` seconds without a heartbeat."""
        self.find_lost: Callable[[], str] = lambda: ""
        """Which rank was lost, in words; empty if none is known to be."""
        self.kind, self.store = kind, store if size > 1 else dist.HashStore()
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.lost_a_rank = False
        """Whether a rank did not reach the end of an operation."""
        self._number, self._kept = 0, list[Operation]()
        # The store can outlive a policy: the next policy's keys must be new to it.
        own, bound_s = f"{kind.name}/of rank {rank}", timeout_s if size > 1 else None
        policies = StoreCalls(bound_s, kind.error)(lambda: self.store.add(own, 1))
        self.root = f"{kind.name}/{policies}"

    def check_lost(self) -> None:
        """This kind's error if a rank was lost."""
        if words := self.find_lost():
            raise self.kind.error(words)

    def copy_store(self) -> dist.Store:
        """The store, over another connection: what waits in it delays none of an operation's calls.
        Older releases of torch have one connection.
        """
        return self.store.clone() if hasattr(self.store, "clone") else self.store

    def begin(self, purpose: str = "") -> Operation:
        """The next operation of all ranks; an error on all if their purposes differ."""
        self._number += 1
        operation = Operation(self, self._number, self.timeout_s)
        self._kept.append(operation)
        if purpose:
            with operation.critical_section():
                words = "one rank is to {first}, another to {own}: call it alike on all ranks"
                operation.check_same("purpose", purpose, words)
        return operation

    def clean_up_before(self, operation: Operation) -> None:
        """Delete what is left of this rank's values of earlier operations: every rank has come to
        that one.
        """
        while self._kept and self._kept[0].number < operation.number:
            self._kept.pop(0).delete_values(operation.call)

    def shut_down(self) -> None:
        """No operation follows and no rank has failed: rank 0 leaves after the others."""
        leaving = Operation(self, self._number + 1, min(self.timeout_s, _SHUTDOWN_S))
        last = self._kept[-1] if self._kept else leaving
        with suppress(self.kind.error):  # a rank that is gone needs nothing
            leaving.go_last(lambda: bool(last.first_failure()))


class Operation:
    """One rank's part in an operation, until it has succeeded or failed on all ranks."""

    def __init__(self, coordinator: Coordinator, number: int, timeout_s: float) -> None:
        self.number = number
        self._coordinator, self._kind = coordinator, coordinator.kind
        self._timeout_s = timeout_s
        self._own, self._left = f"rank {coordinator.rank}: ", False
        self._calls = Counter[str]()
        alone = coordinator.size == 1
        bound_s = None if alone else timeout_s
        self.call = StoreCalls(bound_s, self._kind.error, self._lose_a_rank)
        self._values = OperationValues(
            coordinator.store, f"{coordinator.root}/{number}/", self.call
        )
        pause_s = self._kind.longest_pause_s
        heartbeat = Heartbeat(
            lambda by: self._values.add("beats", by), timeout_s, pause_s, coordinator.find_lost
        )
        self.beat = heartbeat.beat
        self.beating: Callable[[], AbstractContextManager[None]] = heartbeat.beating
        if alone:
            self.beating = nullcontext
        self._wait_while_alive = heartbeat.wait_while_alive
        self.delete_values = self._values.delete

    @contextmanager
    def critical_section(self, name: str = "") -> Iterator[None]:
        """Other ranks wait while the body runs; the body waits for none of them. If it fails, it
        raises this kind's error, or its own ConfigError, and the other ranks raise the same where
        they wait next. Otherwise this rank arrives at the barrier `name`, if one is given.
        """
        try:
            with self.beating():
                yield
        except Exception as error:
            failure = self._kind.wrap(error)
            first = self._fail(str(failure))
            self._leave()
            if isinstance(error, ConfigError):
                raise
            if first.startswith(self._own):
                raise failure from error
            # The first failure is the reason for this one: a directory has gone, for instance.
            raise self._kind.error(first) from error
        if name:
            self.arrive(name)

    def check_same(self, name: str, own: str, words: str) -> None:
        """An error in these `words` if another rank has passed something else as its own. For a
        `critical_section`.
        """
        if (first := self._values.agree_on(name, own)) != own:
            raise self._kind.error(words.format(first=first, own=own))

    def run_together(self, name: str, step: Callable[[], T]) -> T:
        """What `step` returns on this rank, in a critical section; a failure fails all ranks."""
        with self.critical_section(name):
            outcome = step()
        self.wait_for_all(name)
        return outcome

    def arrive(self, name: str) -> None:
        """Say that this rank has come to the barrier `name`."""
        if self._values.add(f"{name}/arrived", 1) == self._coordinator.size:
            self._values.agree_on(name, _ALL)

    def wait_for_all(self, name: str) -> None:
        """Wait until every rank has arrived at the barrier `name`. An error, with the first
        failure, if a rank failed before it arrived, or stopped beating. A failure after all have
        arrived is not raised here: either every rank goes on or none does.
        """
        self._await(name)
        self._coordinator.clean_up_before(self)

    def publish(self, name: str, words: str) -> None:
        """Publish a message to the other ranks."""
        self._values.put(name, f"{_WORDS}{words}")

    def wait_for(self, name: str) -> str:
        """The message that another rank publishes; fails as `wait_for_all` does."""
        return self._await(name).removeprefix(_WORDS)

    def broadcast(self, words: str | None) -> str:
        """The words that one rank passes, of any size, and the others pass None: for all ranks or
        for none.
        """
        call = self._next_call("broadcast")
        if words is not None:
            self._values.put_long(f"{call}/words", words)
        self._meet(call)
        return self._values.get_long(f"{call}/words")

    def gather(self, words: str) -> list[str]:
        """On rank 0 the words of each rank, of any size, once all have come; nothing elsewhere."""
        call = self._next_call("gather")
        self._values.put_long(f"{call}/{self._coordinator.rank}", words)
        self.arrive(call)
        if self._coordinator.rank != 0:
            return []
        self.wait_for_all(call)
        return [self._values.get_long(f"{call}/{rank}") for rank in range(self._coordinator.size)]

    def collect_failures(self, failure: Exception | None) -> str:
        """Wait until every rank has come here. Return why ranks have failed: the reasons of some;
        empty if none has. An error has the reason of this rank, if it has one.
        """
        call = self._next_call("failures")
        try:
            if failure is not None and (number := self._values.add(call, 1)) <= _SHOWN_REASONS:
                words = self._kind.describe(failure)
                self._values.put(f"{call}/{number}", f"{self._coordinator.rank} {words}")
            self._meet(call)
            count = self._values.add(call, 0)
            notes = range(1, min(count, _SHOWN_REASONS) + 1)
            found = [self._values.get(f"{call}/{number}").partition(" ") for number in notes]
        except self._kind.error as error:
            if failure is None:
                raise
            raise self._kind.error(self._kind.describe(failure)) from error
        reasons = sorted((int(rank), words) for rank, _, words in found)
        more = f" ({count} ranks failed)" if count > _SHOWN_REASONS else ""
        return "; ".join(f"rank {rank}: {words}" for rank, words in reasons) + more

    def abort(self, error: BaseException) -> None:
        """Publish why this rank gives up; no rank has to wait for it any more."""
        self._fail(self._kind.describe(error))
        self._leave(with_all=False)

    def first_failure(self, call: StoreCalls | None = None) -> str:
        """The first failure of any rank; empty if none has failed. `call` calls the store in place
        of this operation's own calls.
        """
        return self._values.find("failed", call)

    def leave_together(self) -> None:
        """Call it last, after success. It returns when no other rank needs this one any more, in
        particular not the store of rank 0. A failure here is logged: the operation has succeeded.
        """
        why = ""

        def over() -> bool:
            nonlocal why
            done = self._values.add("done", 0) >= self._coordinator.size
            why = "" if done else self.first_failure()
            return done or bool(why)

        try:
            self._values.add("done", 1)
            silent = not self._wait_while_alive(over)
            if self._coordinator.rank != 0 or not (silent or why):
                silent = not self.go_last() or silent
            if silent:
                silence = f"a rank gave no sign of life for {self._timeout_s:g} s"
                why = self._coordinator.find_lost() or silence
        except self._kind.error as error:
            why = str(error)
        if why:
            self._lose_a_rank()
            _log.warning("done here, but a rank may not know that all are: %s", why)
            self._leave(with_all=False)  # all have done their work: one that has failed can go
        else:
            self._values.forget()  # rank 0 deletes all

    def go_last(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """This rank needs nothing any more. Rank 0 waits until all others have said the same, or
        `given_up`; return whether that came in time. Once all have, it deletes the values.
        """
        if rank := self._coordinator.rank:
            # The last call of this rank. It gets no answer, so rank 0 can go at once.
            self._values.put(f"gone/{rank}", "")
            return True
        others, gone = [f"gone/{other}" for other in range(1, self._coordinator.size)], False

        def over() -> bool:
            nonlocal gone
            gone = self._values.have(others)
            return gone or given_up()

        in_time = self._wait_while_alive(over)
        if gone:
            self._values.use("beats")  # of other ranks, if this one has not waited
            self.delete_values()
        return in_time

    def _next_call(self, kind: str) -> str:
        """The name of this call, whose values are its own: all ranks make as many calls of a kind,
        and count them.
        """
        self._calls[kind] += 1
        return f"{kind} {self._calls[kind]}"

    def _meet(self, name: str) -> None:
        """Wait until every rank has come here. One to which the store does not answer leaves, and
        cannot take back that it has come: it is missed the second time.
        """
        for each in (f"{name}/met", f"{name}/met again"):
            self.arrive(each)
            self.wait_for_all(each)

    def _fail(self, words: str) -> str:
        """Publish why this rank gives up; return the first failure of any rank."""
        return self._values.agree_on("failed", f"{self._own}{words}")

    def _await(self, name: str) -> str:
        """What is published under that name; an error as `wait_for_all` says."""

        def published() -> bool:
            return self._values.find(name) not in ("", _GIVEN_UP)

        self._wait_while_alive(lambda: published() or bool(self.first_failure()))
        if (found := self._values.agree_on(name, _GIVEN_UP)) != _GIVEN_UP:
            # A later failure is raised later: the others can have gone on already.
            return found
        if words := self.first_failure():
            self._leave()
            raise self._kind.error(words)
        silence = self._kind.describe_silence(self._timeout_s, name)
        words = self._coordinator.find_lost() or silence
        self._lose_a_rank()
        first = self._fail(words)
        self._leave(with_all=False)
        raise self._kind.error(words if first.startswith(self._own) else first)

    def _leave(self, *, with_all: bool = True) -> None:
        """Return when all other ranks have given up too, or stopped beating: ranks that still
        work after one has failed look stuck to a driver.
        """
        if self._left:
            return
        self._left, size = True, self._coordinator.size
        with suppress(self._kind.error):
            self._values.add("left", 1)
            if not (
                with_all and self._wait_while_alive(lambda: self._values.add("left", 0) >= size)
            ):
                self._values.add("left", size)  # nothing has to wait any longer

    def _lose_a_rank(self) -> None:
        self._coordinator.lost_a_rank = True
