"""Profiler ranges under the host's method names, in a worker and in its driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_policy.device.profiling import start_profiling, stop_profiling

if TYPE_CHECKING:
    from megatron_policy.workers.cluster.group import WorkerGroup


class WorkerProfiling:
    """One rank's range."""

    def start_gpu_profiling(self) -> None:
        """Start a range for a waiting profiler of this process; without a GPU do nothing."""
        start_profiling()

    def stop_gpu_profiling(self) -> None:
        """End that range."""
        stop_profiling()


class DriverProfiling:
    """All workers' ranges."""

    _workers: WorkerGroup

    def start_gpu_profiling(self) -> None:
        """Start a range for waiting profilers of the workers; without GPUs do nothing."""
        self._workers.run_all("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """End that range."""
        self._workers.run_all("stop_gpu_profiling")
