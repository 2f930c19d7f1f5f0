"""Signs of life for ranks that have nothing to do but wait: a number in a store that grows while
somebody is at work. Knows nothing of the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_policy.refit.patience import started


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
