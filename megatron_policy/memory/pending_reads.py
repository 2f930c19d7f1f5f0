"""Tracks threads that read a policy's memory concurrently with its own operations."""

from __future__ import annotations

from collections.abc import Callable


class PendingReads:
    """Readers of parameters and optimizer state in their own threads.

    Whatever changes or moves that memory waits for them first; reading it does not.
    """

    def __init__(self) -> None:
        self._waits: list[Callable[[], object]] = []

    def add(self, wait: Callable[[], object]) -> None:
        """Register `wait`, which returns when its reader no longer needs the memory."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Return when no reader needs the memory any more."""
        for wait in self._waits:
            wait()
