"""The torch store in which the ranks of a policy meet: calls of it, each bounded in time, values of
an operation, and heartbeats for those that wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist

from megatron_policy.coordination.timeouts import run_with_timeout, start_thread
from megatron_policy.errors import CheckpointError, RefitError

T = TypeVar("T")

_BEATS = 8  # within the silence after which others give up
_SHORTEST_S = 0.0005  # between two looks at the number
_MOMENT_S = 1.0  # for what a rank has said before it was lost
_PIECE = 2**20  # characters; torch's TCPStore drops the connection at a value of more than 8 MiB


class StoreCalls:
    """Calls the store. Once the store has not answered, every further call fails at once."""

    def __init__(
        self,
        timeout_s: float | None,
        error: type[CheckpointError | RefitError],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """No call takes longer than 1.25 * `timeout_s` seconds; None: this process hosts the store.
        `on_failure` is called before `error` is raised.
        """
        self._timeout_s, self._error, self._on_failure = timeout_s, error, on_failure
        self.failure = ""
        """Why the store did not answer; empty if it always has."""

    def __call__(self, step: Callable[[], T], watch: Callable[[], object] | None = None) -> T:
        """The result of `step`, which calls the store. Rank 0 hosts the store and can be stopped or
        gone: that is the `error` of the constructor. See `run_with_timeout` for `watch`.
        """
        if self.failure:
            raise self._error(self.failure)
        if self._timeout_s is None:
            return step()
        try:
            # A process group's own timeout comes first: its message says more.
            return run_with_timeout(1.25 * self._timeout_s + 0.5, step, watch)
        except (TimeoutError, dist.DistError) as error:
            what = (
                "does not answer" if isinstance(error, TimeoutError) else "has left, or was ended"
            )
            line = (str(error).splitlines() or [type(error).__name__])[0]
            self.failure = f"the rendezvous on rank 0 {what} ({line}); check its log"
            self._on_failure()
            raise self._error(self.failure) from error


class OperationValues:
    """One rank's access to the values of an operation in the store. It remembers the names that it
    uses, so that they can be deleted.
    """

    def __init__(self, store: dist.Store, prefix: str, call: StoreCalls) -> None:
        """A key is `prefix` and the value's name; `call` calls the store."""
        self._store, self._prefix, self._call = store, prefix, call
        self._used: set[str] = set()

    def put(self, name: str, words: str) -> None:
        """Set a value. The store gives no answer."""
        (key,) = self.use(name)
        self._call(lambda: self._store.set(key, words))

    def add(self, name: str, number: int) -> int:
        """Add to a number, which begins at 0; return the sum."""
        (key,) = self.use(name)
        return self._call(lambda: self._store.add(key, number))

    def get(self, name: str) -> str:
        """A value, which exists or is about to."""
        (key,) = self.use(name)
        return self._call(lambda: self._store.get(key)).decode()

    def put_long(self, name: str, words: str) -> None:
        """Set a value of any size, for `get_long`."""
        pieces = [words[at : at + _PIECE] for at in range(0, len(words), _PIECE)]
        for number, piece in enumerate(pieces):
            self.put(f"{name}/{number}", piece)
        self.put(name, str(len(pieces)))

    def get_long(self, name: str) -> str:
        """A value that was set by `put_long`, or is about to be."""
        return "".join(self.get(f"{name}/{number}") for number in range(int(self.get(name))))

    def agree_on(self, name: str, words: str) -> str:
        """Set a value unless it exists already; return the one that exists then."""
        (key,) = self.use(name)
        return self._call(lambda: self._store.compare_set(key, "", words)).decode()

    def have(self, names: Sequence[str]) -> bool:
        """Whether all these values exist."""
        keys = self.use(*names)
        return not keys or self._call(lambda: self._store.check(keys))

    def find(self, name: str, call: StoreCalls | None = None) -> str:
        """A value; empty if it does not exist now. Who has set it deletes it. `call` calls the
        store in place of this rank's own.
        """
        key = self._prefix + name
        return (call or self._call)(
            lambda: self._store.get(key).decode() if self._store.check([key]) else ""
        )

    def delete(self, call: StoreCalls | None = None) -> None:
        """Delete the values that this rank has used, with `call` in place of its own. No rank uses
        them any more.
        """
        keys = sorted(self._used)
        (call or self._call)(lambda: [self._store.delete_key(key) for key in keys])
        self.forget()

    def forget(self) -> None:
        """Leave it to another rank to delete the values."""
        self._used.clear()

    def use(self, *names: str) -> list[str]:
        """The keys of these names, which this rank deletes with the others."""
        keys = [self._prefix + name for name in names]
        self._used.update(keys)
        return keys


class Heartbeat:
    """One rank's heartbeats, and those of all: a number that grows while a rank works. `add` adds
    to the number and returns it.
    """

    def __init__(
        self,
        add: Callable[[int], int],
        silence_s: float,
        longest_pause_s: float,
        find_lost: Callable[[], str] = lambda: "",
    ) -> None:
        """A rank gives up after `silence_s` seconds without a beat: beat eight times as often. The
        pauses between two looks at the number grow to `longest_pause_s` seconds. `find_lost` says
        which rank was lost.
        """
        self._find_lost = find_lost
        self._add, self._silence_s, self._longest_pause_s = add, silence_s, longest_pause_s
        self._interval_s = silence_s / _BEATS
        self._last = 0.0

    def beat(self) -> None:
        """Beat if it is time. Call it often."""
        now = time.monotonic()
        if now - self._last > self._interval_s:
            self._last = now
            self._add(1)

    def wait_while_alive(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition; return False if no rank beats for too long, or one was lost."""
        pause, seen, quiet_since = _SHORTEST_S, -1, time.monotonic()
        lost_since = math.inf
        while not condition():
            count, now = self._add(0), time.monotonic()
            seen, quiet_since = count, quiet_since if count == seen else now
            lost_since = min(lost_since, now) if self._find_lost() else math.inf
            if now - quiet_since > self._silence_s or now - lost_since > _MOMENT_S:
                return False
            time.sleep(pause)
            pause = min(2 * pause, self._longest_pause_s)
        return True

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beat from a thread until the body ends. The body waits for something that ends itself."""
        over = threading.Event()

        def beat() -> None:
            with suppress(CheckpointError, RefitError):  # the next call in the body reports it
                while not over.wait(self._interval_s):
                    self._add(1)

        thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
        started = start_thread(thread)
        try:
            yield
        finally:
            over.set()
            if started:
                thread.join()
