"""Signs of life for ranks that have nothing to do but wait: a number in a store that grows while
somebody is at work. Knows nothing of the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_policy.coordination.timeouts import start_thread

_SHORTEST_S, _LONGEST_S = 0.0005, 0.1  # between two looks


class Heartbeat:
    """One rank's signs of life, given by `add`, which adds to the number and returns it."""

    def __init__(self, add: Callable[[int], int], interval_s: float) -> None:
        """At most one sign every `interval_s` seconds."""
        self._add, self._interval_s = add, interval_s
        self._last = 0.0

    def count(self) -> int:
        """The number; another than the last time when somebody has given a sign since."""
        return self._add(0)

    def beat(self) -> None:
        """Give a sign, if it is time; to be called often."""
        now = time.monotonic()
        if now - self._last > self._interval_s:
            self._last = now
            self._add(1)

    def wait_while_alive(self, condition: Callable[[], bool], silence_s: float) -> bool:
        """Wait for the condition; False if nobody gives a sign of life for so long."""
        pause, seen, quiet_since = _SHORTEST_S, -1, time.monotonic()
        while not condition():
            sign, now = self.count(), time.monotonic()
            seen, quiet_since = sign, quiet_since if sign == seen else now
            if now - quiet_since > silence_s:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        return True

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Signs all through the body, which waits for somebody else and ends by itself."""
        over = threading.Event()

        def beat() -> None:
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
