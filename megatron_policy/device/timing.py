"""Times what the device does, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_policy.device import is_accelerated


class Stopwatch:
    """How long named parts of this process's work have taken: on a GPU between events of the
    current stream, on the CPU between two readings of the clock.

    Timing never waits for the device. `seconds` expects that the device has finished what was
    timed: read it after something that waits anyway.
    """

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the body's work to `part`."""
        start = _now()
        try:
            yield
        finally:
            self._spans.setdefault(part, []).append((start, _now()))

    def seconds(self, part: str) -> float:
        """Seconds of all work on `part` since the last restart; 0 if there was none."""
        return sum(_between(*span) for span in self._spans.get(part, ()))

    def restart(self) -> None:
        """Forget what was timed."""
        self._spans.clear()


def _now() -> Any:
    if not is_accelerated():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    """Seconds; on a GPU, RuntimeError from torch if the device has not come to `end`."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000
