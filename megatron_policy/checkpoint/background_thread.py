"""A thread that computes one thing after another beside its owner; knows not what.

A save in the background may outlive the script: those of `concurrent.futures` take no work any more
while the interpreter waits for its last threads. It starts none then either; what would be computed
beside is computed in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Self, TypeVar

from megatron_policy.coordination.timeouts import start_thread

In = TypeVar("In")
Out = TypeVar("Out")


class Beside(Generic[In, Out]):
    """`give` it one thing at a time, then `take` what came of it."""

    def __init__(self, work: Callable[[In], Out]) -> None:
        """`work` must not raise."""
        self._given: SimpleQueue[In | None] = SimpleQueue()
        self._done: SimpleQueue[Out] = SimpleQueue()
        self._work = work
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
        self._works = start_thread(self._thread)

    def give(self, thing: In) -> None:
        """Start on this."""
        if self._works:
            self._given.put(thing)
        else:
            self._done.put(self._work(thing))

    def take(self) -> Out:
        """What came of the thing given first of those not taken yet; waits for it."""
        return self._done.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._works:
            self._given.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (thing := self._given.get()) is not None:
            self._done.put(self._work(thing))
