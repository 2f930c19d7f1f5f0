"""Signs of life for ranks that have nothing to do but wait: a number in a store that grows while
somebody is at work. Knows nothing of the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_policy.refit.patience import started

_SHORTEST_S, _LONGEST_S = 0.0005, 0.1  # between two looks


class Pulse:
    """One rank's signs of life, given by `add`, which adds to the number and returns it."""

    def __init__(self, add: Callable[[int], int], interval_s: float) -> None:
        """At most one sign every `interval_s` seconds."""
        self._add, self._interval_s = add, interval_s
        self._told = 0.0

    def look(self) -> int:
        """The number; another than the last time when somebody has given a sign since."""
        return self._add(0)

    def tell(self) -> None:
        """Give a sign, if it is time; to be called often."""
        now = time.monotonic()
        if now - self._told > self._interval_s:
            self._told = now
            self._add(1)

    def lasts_until(self, condition: Callable[[], bool], silence_s: float) -> bool:
        """Wait for the condition; False if nobody gives a sign of life for so long."""
        pause, seen, quiet_since = _SHORTEST_S, -1, time.monotonic()
        while not condition():
            sign, now = self.look(), time.monotonic()
            seen, quiet_since = sign, quiet_since if sign == seen else now
            if now - quiet_since > silence_s:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        return True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Signs all through the body, which waits for somebody else and ends by itself."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(self._interval_s):
                self._add(1)

        teller = threading.Thread(target=tell, daemon=True, name="refit-pulse")
        told = started(teller)
        try:
            yield
        finally:
            over.set()
            if told:
                teller.join()
