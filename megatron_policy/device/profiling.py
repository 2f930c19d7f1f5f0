"""Marks the range that an external profiler records, records operations, and names the device."""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_policy.device import is_accelerated, synchronize


def start_profiling() -> None:
    """Start the range that a waiting profiler (`nsys profile --capture-range=cudaProfilerApi`)
    records; do nothing on the CPU, where profilers attach from outside.
    """
    if is_accelerated():
        torch.cuda.profiler.start()


def stop_profiling() -> None:
    """End that range; do nothing on the CPU."""
    if is_accelerated():
        torch.cuda.profiler.stop()


def device_name() -> str:
    """The vendor's name of the device this process computes on; on the CPU, the architecture."""
    return torch.cuda.get_device_name() if is_accelerated() else f"CPU {platform.machine()}"


@dataclass(frozen=True)
class OperationTime:
    """All calls of one operation, or of one kernel of the GPU, and the seconds that they took
    without the operations that they called.
    """

    name: str
    calls: int
    seconds: float


class OperationProfiler:
    """torch's profiler of what this process runs, on the host and on its GPU."""

    def __init__(self) -> None:
        activity = torch.profiler.ProfilerActivity
        on = [activity.CPU, activity.CUDA] if is_accelerated() else [activity.CPU]
        self._profiler = torch.profiler.profile(activities=on)

    def start(self) -> None:
        """Begin to record."""
        self._profiler.start()

    def stop(self) -> None:
        """End."""
        synchronize()
        self._profiler.stop()

    def write(self, path: Path) -> None:
        """Write a Chrome trace, compressed if the name ends in .gz."""
        self._profiler.export_chrome_trace(str(path))

    def operations(self, without: Collection[str] = ()) -> list[OperationTime]:
        """What took longest first: kernels where there is a GPU, else operations. Names in
        `without` are left out.
        """
        found = []
        for each in self._profiler.key_averages():
            own = each.self_device_time_total if is_accelerated() else each.self_cpu_time_total
            if own and each.key not in without:
                found.append(OperationTime(each.key, each.count, own / 1e6))
        return sorted(found, key=lambda each: -each.seconds)
