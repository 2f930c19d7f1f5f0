"""Marks the range that an external profiler records, and names the device."""

from __future__ import annotations

import platform

import torch

from megatron_policy.device import is_accelerated


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
