"""Heartbeats of ranks, for those that wait: a number in a store which grows while a rank works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.errors import CheckpointError, RefitError

_BEATS = 8  # within the silence after which others give up
_SHORTEST_S = 0.0005  # between two looks at the number


class Heartbeat:
    """One rank's heartbeats. `add` adds to the number that all ranks share, and returns it."""

    def __init__(self, add: Callable[[int], int], silence_s: float) -> None:
        """Others give up after `silence_s` seconds without a beat: beat eight times as often."""
        self._add, self._interval_s = add, silence_s / _BEATS
        self._last = 0.0

    def beat(self) -> None:
        """Beat if it is time. Call it often."""
        now = time.monotonic()
        if now - self._last > self._interval_s:
            self._last = now
            self._add(1)

    def wait_while_alive(
        self, condition: Callable[[], bool], silence_s: float, longest_pause_s: float
    ) -> bool:
        """Wait for the condition; return False if no rank beats for `silence_s` seconds. The pauses
        between two looks grow to `longest_pause_s` seconds.
        """
        pause, seen, quiet_since = _SHORTEST_S, -1, time.monotonic()
        while not condition():
            count, now = self._add(0), time.monotonic()
            seen, quiet_since = count, quiet_since if count == seen else now
            if now - quiet_since > silence_s:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest_pause_s)
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
