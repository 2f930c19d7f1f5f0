"""How the ranks of a policy go through a save or a load together: notes in the store where they
met. No collectives, so a thread beside the training may do it; knows nothing of checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist

from megatron_policy.coordination.departure import Departure, store_failure
from megatron_policy.coordination.heartbeat import Heartbeat
from megatron_policy.coordination.timeouts import run_with_timeout
from megatron_policy.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SIGNS = 8  # of life, in the longest wait


class Coordinator:
    """One rank's seat: `open` it for each thing that all ranks undertake, in the same order."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        """No wait is longer than `timeout_s` seconds, counted from the last sign of life."""
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.deserted = False
        """Whether a rank was missing when it was waited for last."""
        self._store, self._number, self._cleaned = store, 0, 0
        # The store may outlive a policy, and what the next one's ranks leave there must be new.
        first = 0 if size == 1 else store.add(f"council/of rank {rank}", 1)
        self._root = f"council/{first}"

    def begin(self, purpose: str = "") -> CollectiveOperation:
        """The next undertaking of all ranks; CheckpointError, on all of them, where their purposes
        differ.
        """
        self._number += 1
        under = CollectiveOperation(self, self._store, self._root, self._number)
        under.check_same_purpose(purpose)
        return under

    def all_are_at(self, number: int) -> None:
        """Every rank has come to that undertaking, so nobody looks for earlier notes any more."""
        if self.rank != 0:
            return
        while self._cleaned < number - 1:
            self._cleaned += 1
            gone = (f"gone/{rank}" for rank in range(1, self.size))
            for name in ("failed", "left", "signs", "purpose", "alike", "done", *gone, *_NAMES):
                for suffix in ("", "/arrived"):
                    self._store.delete_key(f"{self._root}/{self._cleaned}/{name}{suffix}")


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
"""What ranks tell each other, or wait for, in an undertaking."""


class CollectiveOperation:
    """What one rank has to do with the others until something is done, or given up by all."""

    def __init__(self, coordinator: Coordinator, store: dist.Store, root: str, number: int) -> None:
        self._coordinator, self._store, self._number = coordinator, store, number
        self._root = root = f"{root}/{number}"
        self._own = f"rank {coordinator.rank}: "
        self._alone = coordinator.size == 1
        self._published: dict[str, str] = {}
        self._left = self._alone
        self._heartbeat = Heartbeat(
            lambda by: self._call(lambda: self._store.add(f"{root}/signs", by)),
            coordinator.timeout_s / _SIGNS,
        )

    def check_same_purpose(self, purpose: str) -> None:
        """CheckpointError unless this is what the ranks that came before are here for."""
        if self._alone:
            return
        key = f"{self._root}/purpose"
        first = self._call(lambda: self._store.compare_set(key, "", purpose)).decode()
        if first != purpose:
            words = f"one rank is to {first}, another to {purpose}: call it on all ranks alike"
            self._fail(words)
            self._leave()
            raise CheckpointError(words)

    @contextmanager
    def critical_section(self, name: str = "") -> Iterator[None]:
        """The others wait while the body goes on, which waits for none of them, and hear of its
        failure, which is a CheckpointError here, or the ConfigError it is, once they have come to
        where they hear it. Afterwards this rank has arrived at `name`, if that is given.
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
            # What failed first is why this failed: the directory is gone, for instance.
            raise CheckpointError(said) from error
        if name:
            self._arrive(name)

    def check_same_value(self, found: str) -> None:
        """CheckpointError if another rank has come with something else; for a body in a
        `critical_section`.
        """
        if self._alone:
            return
        key = f"{self._root}/alike"
        first = self._call(lambda: self._store.compare_set(key, "", found)).decode()
        if first != found:
            raise CheckpointError(
                f"this rank has found {found}, another {first}: all of them have to see the same "
                "directories"
            )

    def wait_for_all(self, name: str) -> None:
        """Until every rank has arrived at `name`; CheckpointError, with the words of who failed
        first, where one has before it did or gives no sign of life. What fails when all have
        arrived is not heard of here: every rank goes on, or none.
        """
        self._await(name)
        if not self._alone:
            self._call(lambda: self._coordinator.all_are_at(self._number))

    def publish(self, name: str, words: str) -> None:
        """Leave a note for the others."""
        assert name in _NAMES, name
        if self._alone:
            self._published[name] = words
        else:
            self._call(lambda: self._store.set(f"{self._root}/{name}", words))

    def wait_for(self, name: str) -> str:
        """The note that another rank leaves; waits for it as `wait` does."""
        if self._alone:
            return self._published[name]
        self._await(name)
        return self._call(lambda: self._store.get(f"{self._root}/{name}")).decode()

    def leave_together(self) -> None:
        """To be called last where all has gone well: return when the others need nothing more of
        this rank for it, in particular not the store of rank 0. What fails now undoes nothing.
        """
        if self._alone:
            return
        coordinator, call = self._coordinator, self._call
        departure = Departure(
            self._store, self._root, coordinator.rank, coordinator.size, call, self._heartbeat
        )
        if why := departure.leave_together(coordinator.timeout_s, self._published_failure):
            coordinator.deserted = True
            _log.warning("done here, but a rank may not know that all are: %s", why)

    def _published_failure(self) -> str:
        """What was told of a failure first, by whichever rank; empty if none has failed."""
        failed = f"{self._root}/failed"
        if not self._call(lambda: self._store.check([failed])):
            return ""
        return self._call(lambda: self._store.get(failed)).decode()

    def _arrive(self, name: str) -> None:
        assert name in _NAMES, name
        if self._alone:
            return
        arrived = self._call(lambda: self._store.add(f"{self._root}/{name}/arrived", 1))
        if arrived == self._coordinator.size:
            self.publish(name, "all")

    def _fail(self, words: str) -> str:
        """Tell why this rank gives up; returns what was told first, by whichever rank."""
        said = f"{self._own}{words}"
        if self._alone:
            return said
        key = f"{self._root}/failed"
        return self._call(lambda: self._store.compare_set(key, "", said)).decode()

    def _await(self, name: str) -> None:
        if self._alone:
            return
        note, failed = f"{self._root}/{name}", f"{self._root}/failed"

        def told() -> bool:
            return self._call(lambda: self._store.check([note]) or self._store.check([failed]))

        heard = self._wait_while_alive(told)
        if self._call(lambda: self._store.check([note])):
            # Who fails later is heard of later: here the others may have gone on without it.
            return
        if said := self._published_failure():
            self._leave()
            raise CheckpointError(said)
        if not heard:
            words = (
                f"a rank gave no sign of life for {self._coordinator.timeout_s:g} s while the "
                f"others waited for {name!r}. Look at its log; checkpoint_timeout_s sets how "
                "long to wait"
            )
            self._coordinator.deserted = True
            self._fail(words)
            self._leave(with_all=False)
            raise CheckpointError(words)

    def _leave(self, *, with_all: bool = True) -> None:
        """Go when all others have come to give up too, or show no sign of life any more: a driver
        takes ranks that are still at work when one has failed for stuck.
        """
        if self._left:
            return
        self._left, key, size = True, f"{self._root}/left", self._coordinator.size

        def all_have() -> bool:
            return self._call(lambda: self._store.add(key, 0)) >= size

        with suppress(CheckpointError):
            self._call(lambda: self._store.add(key, 1))
            if not (with_all and self._wait_while_alive(all_have)):
                self._call(lambda: self._store.add(key, size))  # nobody need wait any longer

    def _wait_while_alive(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition; False if no rank gives a sign of life for so long."""
        return self._heartbeat.wait_while_alive(condition, self._coordinator.timeout_s)

    @contextmanager
    def _beating(self) -> Iterator[None]:
        if self._alone:
            yield
            return
        with self._heartbeat.beating():
            yield

    def _call(self, step: Callable[[], T]) -> T:
        """What `step` makes of the store, whose host, rank 0, may have stopped or gone."""
        try:
            return run_with_timeout(1.25 * self._coordinator.timeout_s + 0.5, step)
        except (TimeoutError, dist.DistError) as error:
            self._coordinator.deserted = True
            raise CheckpointError(store_failure(error)) from error


def as_checkpoint_error(error: Exception) -> CheckpointError:
    """The error itself, or one that says what it says."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError) and error.filename:
        return CheckpointError(f"{error.filename}: {error.strerror}")
    plain = isinstance(error, RuntimeError | ValueError) and str(error)
    return CheckpointError(str(error) if plain else f"{type(error).__name__}: {error}")
