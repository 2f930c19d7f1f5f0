"""Marks the range that a profiler outside this process records, and names the device; knows no
work.
"""

from __future__ import annotations

import platform

import torch

from megatron_policy.device import is_accelerated


def start_profiling() -> None:
    """A profiler that waits for it (`nsys profile --capture-range=cudaProfilerApi`) records from
    here; nothing on the CPU, where profilers attach from outside.
    """
    if is_accelerated():
        torch.cuda.profiler.start()


def stop_profiling() -> None:
    """It records no longer; nothing on the CPU."""
    if is_accelerated():
        torch.cuda.profiler.stop()


def device_name() -> str:
    """The model of the device that this process computes on, as its maker calls it; on the CPU the
    architecture.
    """
    return torch.cuda.get_device_name() if is_accelerated() else f"CPU {platform.machine()}"
