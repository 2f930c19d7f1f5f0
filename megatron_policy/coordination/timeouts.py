"""Default timeouts, and bounds for calls that have none of their own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from megatron_policy.errors import ConfigError

DEFAULT_TIMEOUT_S = 120.0
COLLECTIVE_TIMEOUT_S = 600.0
WORKER_TIMEOUT_S = 20.0
SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S = 1e-3, 1e6
"""Libraries count some of these waits in 32-bit milliseconds, after 1.5 times the timeout."""

ENGINE_SHARE = 0.75
"""Of a refit's timeout: how long a training rank waits for its engine. The other ranks wait for
this one for the whole timeout, so they hear the reason before their own time is up."""

_WATCH_S = 0.2

T = TypeVar("T")


def checked_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """The timeout itself; ConfigError, with its name, if it cannot bound a wait."""
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not SHORTEST_TIMEOUT_S <= timeout_s <= LONGEST_TIMEOUT_S:
        raise ConfigError(
            f"{name} is {timeout_s!r}: give seconds between {SHORTEST_TIMEOUT_S:g} and "
            f"{LONGEST_TIMEOUT_S:g}"
        )
    return timeout_s


def start_thread(thread: threading.Thread) -> bool:
    """Start it; False if the interpreter is ending and starts no more threads."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


class _Caller:
    """A thread that makes calls for others, one after another: to start one for each call would
    take many times as long as most calls.
    """

    def __init__(self) -> None:
        self.calls, self.outcomes = SimpleQueue[Any](), SimpleQueue[tuple[Any, Any]]()
        self.thread = threading.Thread(target=self._serve, daemon=True, name="bounded-calls")

    def _serve(self) -> None:
        while (step := self.calls.get()) is not None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = step(), None
            except BaseException as error:
                outcome = None, error
            self.outcomes.put(outcome)
            del step, outcome  # nothing of a call stays alive here

    def wait(self, timeout_s: float, watch: Callable[[], object] | None) -> tuple[Any, Any]:
        """What a call returned, and what it raised."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            with suppress(Empty):
                return self.outcomes.get(timeout=left if watch is None else min(left, _WATCH_S))
            if watch is not None:
                watch()
        raise TimeoutError(f"no answer within {timeout_s:g} s")


_idle: list[_Caller] = []
os.register_at_fork(after_in_child=_idle.clear)  # a fork has no threads


def run_with_timeout(
    timeout_s: float, step: Callable[[], T], watch: Callable[[], object] | None = None
) -> T:
    """What `step` returns or raises; TimeoutError if that takes longer than `timeout_s` seconds, or
    what `watch` raises, which is called now and then meanwhile.

    After a timeout, `step` goes on in a thread that nothing waits for: it must not touch what
    others use. Made for torch's store, whose client waits without end for a host that is stopped.
    Where no thread can be started, as while the interpreter is ending, `step` runs here, unbounded.
    """
    try:
        caller = _idle.pop()
    except IndexError:
        caller = _Caller()
    if sys.is_finalizing() or not (caller.thread.ident or start_thread(caller.thread)):
        return step()
    next_one: _Caller | None = None
    try:
        caller.calls.put(step)
        value, error = caller.wait(timeout_s, watch)
        next_one = caller
    finally:
        if next_one is None:  # it is still at this call, and ends after it
            caller.calls.put(None)
        else:
            _idle.append(caller)
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]
