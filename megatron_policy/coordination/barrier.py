"""Operations that all ranks of a policy carry out together and that fail on all of them together.
They use the store of the ranks, no collectives, so that a background thread can run one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from megatron_policy.coordination.departure import Departure
from megatron_policy.coordination.first_failure import FirstFailure
from megatron_policy.coordination.heartbeat import Heartbeat
from megatron_policy.coordination.store import StoreCalls
from megatron_policy.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)


class Coordinator:
    """One rank's part in the operations: every rank begins the same ones in the same order."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        """No wait is longer than `timeout_s` seconds without a heartbeat."""
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.lost_a_rank = False
        """Whether a rank did not reach the end of an operation."""
        self._store, self._number, self._cleaned = store, 0, 0
        # The store can outlive a policy: the next policy's keys must be new to it.
        policies = 0 if size == 1 else store.add(f"barrier/of rank {rank}", 1)
        self._root = f"barrier/{policies}"

    def begin(self, purpose: str = "") -> CollectiveOperation:
        """The next operation of all ranks; CheckpointError on all if their purposes differ."""
        self._number += 1
        operation = CollectiveOperation(self, self._store, self._root, self._number)
        operation.check_same_purpose(purpose)
        return operation

    def clean_up_before(self, number: int) -> None:
        """Delete the keys of earlier operations: every rank has come to this one."""
        if self.rank != 0:
            return
        while self._cleaned < number - 1:
            self._cleaned += 1
            gone = (f"gone/{rank}" for rank in range(1, self.size))
            for name in (*_KEYS, *gone, *_NAMES):
                for suffix in ("", "/arrived"):
                    self._store.delete_key(f"{self._root}/{self._cleaned}/{name}{suffix}")


_KEYS = ("failed", "left", "beats", "purpose", "value", "done")
"""The other keys of an operation, except those of the ranks that are gone."""

_NAMES = (
    "where",
    "written",
    "published",
    "checked",
    "ready",
    "found",
    "verified",
    "mapped",
    "read",
    "restored",
)
"""The messages and barriers of operations: `clean_up_before` deletes all keys by name."""

_ALL, _GIVEN_UP = "all", "given up"
"""What a barrier says: all ranks have arrived, or one gave up waiting before they had."""


_WORDS = "words: "
"""Precedes a message: to the store an empty value is none, which another rank could replace."""


class CollectiveOperation:
    """One rank's part in an operation, until it has succeeded or failed on all ranks."""

    def __init__(self, coordinator: Coordinator, store: dist.Store, root: str, number: int) -> None:
        self._coordinator, self._store, self._number = coordinator, store, number
        self._root = root = f"{root}/{number}"
        self._own = f"rank {coordinator.rank}: "
        self._alone = coordinator.size == 1
        self._published: dict[str, str] = {}
        self._left = self._alone
        self._call = StoreCalls(coordinator.timeout_s, CheckpointError, self._lose_a_rank)
        self._heartbeat = Heartbeat(
            lambda by: self._call(lambda: self._store.add(f"{root}/beats", by)),
            coordinator.timeout_s,
        )
        self._first_failure = FirstFailure(store, f"{root}/failed", self._call)

    def check_same_purpose(self, purpose: str) -> None:
        """CheckpointError if a rank has begun this operation for another purpose."""
        if self._alone:
            return
        key = f"{self._root}/purpose"
        first = self._call(lambda: self._store.compare_set(key, "", purpose)).decode()
        if first != purpose:
            words = f"one rank is to {first}, another to {purpose}: call it alike on all ranks"
            self._fail(words)
            self._leave()
            raise CheckpointError(words)

    @contextmanager
    def critical_section(self, name: str = "") -> Iterator[None]:
        """Other ranks wait while the body runs; the body waits for none of them. If it fails, it
        raises CheckpointError, or its own ConfigError, and the other ranks raise the same where
        they wait next. Otherwise this rank arrives at the barrier `name`, if one is given.
        """
        try:
            with self._beating():
                yield
        except Exception as error:
            failure = as_checkpoint_error(error)
            said = self._fail(str(failure))
            self._leave()
            if isinstance(error, ConfigError):
                raise
            if said.startswith(self._own):
                raise failure from error
            # The first failure is the reason for this one: a directory has gone, for instance.
            raise CheckpointError(said) from error
        if name:
            self._arrive(name)

    def check_same_value(self, found: str) -> None:
        """CheckpointError if another rank has found something else. For a `critical_section`."""
        if self._alone:
            return
        key = f"{self._root}/value"
        first = self._call(lambda: self._store.compare_set(key, "", found)).decode()
        if first != found:
            raise CheckpointError(
                f"this rank has found {found}, another {first}: all ranks have to see the same "
                "directories"
            )

    def wait_for_all(self, name: str) -> None:
        """Wait until every rank has arrived at the barrier `name`. CheckpointError, with the first
        failure, if a rank failed before it arrived, or stopped beating. A failure after all have
        arrived is not raised here: either every rank goes on or none does.
        """
        self._await(name)
        if not self._alone:
            self._call(lambda: self._coordinator.clean_up_before(self._number))

    def publish(self, name: str, words: str) -> None:
        """Publish a message to the other ranks."""
        assert name in _NAMES, name
        if self._alone:
            self._published[name] = words
        else:
            self._call(lambda: self._store.set(f"{self._root}/{name}", f"{_WORDS}{words}"))

    def wait_for(self, name: str) -> str:
        """The message that another rank publishes; fails as `wait_for_all` does."""
        if self._alone:
            return self._published[name]
        self._await(name)
        said = self._call(lambda: self._store.get(f"{self._root}/{name}")).decode()
        return said.removeprefix(_WORDS)

    def leave_together(self) -> None:
        """Call it last, after success. It returns when no other rank needs this one any more, in
        particular not the store of rank 0. A failure here is logged: the operation has succeeded.
        """
        if self._alone:
            return
        coordinator, call = self._coordinator, self._call
        departure = Departure(
            self._store, self._root, coordinator.rank, coordinator.size, call, self._heartbeat
        )
        if why := departure.leave_together(coordinator.timeout_s, self._first_failure.read):
            coordinator.lost_a_rank = True
            _log.warning("done here, but a rank may not know that all are: %s", why)
            self._leave(with_all=False)  # all have done their work: one that has failed can go

    def _arrive(self, name: str) -> None:
        assert name in _NAMES, name
        if self._alone:
            return
        arrived = self._call(lambda: self._store.add(f"{self._root}/{name}/arrived", 1))
        if arrived == self._coordinator.size:
            self._decide(name, _ALL)

    def _decide(self, name: str, outcome: str) -> str:
        """The outcome of a barrier: what the first rank to decide has said."""
        key = f"{self._root}/{name}"
        return self._call(lambda: self._store.compare_set(key, "", outcome)).decode()

    def _fail(self, words: str) -> str:
        """Publish why this rank gives up; returns the first failure of any rank."""
        said = f"{self._own}{words}"
        return said if self._alone else self._first_failure.publish(said)

    def _await(self, name: str) -> None:
        if self._alone:
            return
        key = f"{self._root}/{name}"

        def published() -> bool:
            given_up = _GIVEN_UP.encode()
            return self._call(lambda: self._store.check([key]) and self._store.get(key) != given_up)

        self._wait_while_alive(lambda: published() or bool(self._first_failure.read()))
        if published() or self._decide(name, _GIVEN_UP) != _GIVEN_UP:
            # A later failure is raised later: the others can have gone on already.
            return
        if said := self._first_failure.read():
            self._leave()
            raise CheckpointError(said)
        words = (
            f"a rank gave no sign of life for {self._coordinator.timeout_s:g} s while the others "
            f"waited for {name!r}. Check its log; checkpoint_timeout_s sets how long to wait"
        )
        self._coordinator.lost_a_rank = True
        self._fail(words)
        self._leave(with_all=False)
        raise CheckpointError(words)

    def _leave(self, *, with_all: bool = True) -> None:
        """Return when all other ranks have given up too, or stopped beating: ranks that still
        work after one has failed look stuck to a driver.
        """
        if self._left:
            return
        self._left, key, size = True, f"{self._root}/left", self._coordinator.size

        def all_have() -> bool:
            return self._call(lambda: self._store.add(key, 0)) >= size

        with suppress(CheckpointError):
            self._call(lambda: self._store.add(key, 1))
            if not (with_all and self._wait_while_alive(all_have)):
                self._call(lambda: self._store.add(key, size))  # nothing has to wait any longer

    def _wait_while_alive(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition; False if no rank beats for the timeout."""
        return self._heartbeat.wait_while_alive(condition, self._coordinator.timeout_s)

    @contextmanager
    def _beating(self) -> Iterator[None]:
        if self._alone:
            yield
            return
        with self._heartbeat.beating():
            yield

    def _lose_a_rank(self) -> None:
        self._coordinator.lost_a_rank = True


def as_checkpoint_error(error: Exception) -> CheckpointError:
    """The error itself, or a CheckpointError with its message."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError) and error.filename:
        return CheckpointError(f"{error.filename}: {error.strerror}")
    plain = isinstance(error, RuntimeError | ValueError) and str(error)
    return CheckpointError(str(error) if plain else f"{type(error).__name__}: {error}")
