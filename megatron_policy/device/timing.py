"""Times what the device does, without waiting for it, and records when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_policy.device import is_accelerated, synchronize

FORWARD, BACKWARD = "forward", "backward"
"""A pass of one microbatch through one model chunk."""

TRAINING, SCORING = "forward_backward", "forward_only"
"""A run of a schedule over microbatches, of both passes or of one."""


@dataclass(frozen=True)
class TimeSpan:
    """A part of a process's work, from `begin` to `end` in seconds. A pass over a microbatch has
    its number, in the order of the batch, and that of the model chunk.
    """

    name: str
    begin: float
    end: float
    microbatch: int | None = None
    chunk: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass
class _Mark:
    """A span in the making: `begin` and `end` are readings of `_now`."""

    name: str
    begin: Any
    annotation: torch.profiler.record_function
    end: Any = None
    microbatch: int | None = None
    chunk: int = 0


class Recorder:
    """Keeps when each part of this process's work began and ended, from `start` to `stop`, and
    names these parts to torch's profiler. While it is off it keeps and costs nothing.

    Recording never waits for the device: `stop` does, once.
    """

    def __init__(self) -> None:
        self._done: list[_Mark] | None = None
        self._open: list[_Mark] = []
        self._base: Any = None
        self._clock = 0.0

    @property
    def on(self) -> bool:
        """Whether it records."""
        return self._done is not None

    def start(self) -> None:
        """Record from now on."""
        assert not self.on, "the recorder is on already"
        synchronize()
        self._done, self._open = [], []
        self._base, self._clock = _now(), time.time()

    def stop(self) -> tuple[TimeSpan, ...]:
        """Return what has ended since `start`, in the order of beginnings, in seconds of this
        host's clock.
        """
        assert self._done is not None, "the recorder is off"
        synchronize()
        done, self._done = self._done, None
        spans = [
            TimeSpan(
                each.name, self._at(each.begin), self._at(each.end), each.microbatch, each.chunk
            )
            for each in done
        ]
        return tuple(sorted(spans, key=lambda span: (span.begin, -span.end)))

    def begin(self, name: str) -> None:
        """Begin a part, inside those that are open."""
        if self._done is not None:
            annotation = torch.profiler.record_function(name)
            annotation.__enter__()
            self._open.append(_Mark(name, _now(), annotation))

    def label(self, microbatch: int, chunk: int = 0) -> None:
        """Say which pass the part is that has begun last."""
        if self._open:
            self._open[-1].microbatch, self._open[-1].chunk = microbatch, chunk

    def end(self, name: str) -> None:
        """End the part of this name that has begun last; what has begun in it and has not ended,
        because of an error, is dropped.
        """
        while self._open:
            mark = self._open.pop()
            mark.end = _now()
            mark.annotation.__exit__(None, None, None)
            if mark.name == name:
                if self._done is not None:
                    self._done.append(mark)
                return

    @contextmanager
    def span(self, name: str, microbatch: int | None = None) -> Iterator[None]:
        """Record the body as a part."""
        self.begin(name)
        if microbatch is not None:
            self.label(microbatch)
        try:
            yield
        finally:
            self.end(name)

    def _at(self, mark: Any) -> float:
        return self._clock + _between(self._base, mark)


class Stopwatch:
    """How long named parts of this process's work have taken: on a GPU between events of the
    current stream, on the CPU between two readings of the clock.

    Timing never waits for the device. `seconds` expects that the device has finished what was
    timed: read it after something that waits anyway. `recorder` can keep the parts one by one.
    """

    def __init__(self) -> None:
        self.recorder = Recorder()
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
