"""A background thread that processes work one item at a time.

A background save may outlive the script. The executors of `concurrent.futures` accept no work while
the interpreter waits for its last threads. No thread can be started then either; the work is then
done in place.
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
    """`give` it one thing at a time, then `take` the result."""

    def __init__(self, work: Callable[[In], Out]) -> None:
        """`work` must not raise."""
        self._given: SimpleQueue[In | None] = SimpleQueue()
        self._done: SimpleQueue[Out] = SimpleQueue()
        self._work = work
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
        self._works = start_thread(self._thread)

    def give(self, thing: In) -> None:
        """Start work on `thing`."""
        if self._works:
            self._given.put(thing)
        else:
            self._done.put(self._work(thing))

    def take(self) -> Out:
        """The result of the oldest thing given whose result was not taken yet; waits for it."""
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
