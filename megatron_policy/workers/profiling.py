"""Ranges for a profiler under the host's names, in a worker and in its driver; knows no work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_policy.device.profiling import start_profiling, stop_profiling

if TYPE_CHECKING:
    from megatron_policy.workers.group import WorkerGroup


class WorkerProfiling:
    """One rank's range."""

    def start_gpu_profiling(self) -> None:
        """A profiler that waits for a range records this process from here; without a GPU nothing
        happens.
        """
        start_profiling()

    def stop_gpu_profiling(self) -> None:
        """The end of that range."""
        stop_profiling()


class DriverProfiling:
    """The same on all workers."""

    _workers: WorkerGroup

    def start_gpu_profiling(self) -> None:
        """Profilers that wait for a range record the workers from here; without GPUs nothing
        happens.
        """
        self._workers.run_all("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """The end of that range."""
        self._workers.run_all("stop_gpu_profiling")
