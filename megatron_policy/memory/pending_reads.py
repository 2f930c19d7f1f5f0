"""Who reads a policy's memory beside what it does itself; knows neither."""

from __future__ import annotations

from collections.abc import Callable


class PendingReads:
    """Those who read parameters and optimizer state in threads of their own.

    Whatever changes or moves that memory waits for them first; reading it does not.
    """

    def __init__(self) -> None:
        self._waits: list[Callable[[], object]] = []

    def add(self, wait: Callable[[], object]) -> None:
        """From now on `wait` is called; it returns when this reader needs the memory no more."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Return when nobody reads the memory any more."""
        for wait in self._waits:
            wait()
