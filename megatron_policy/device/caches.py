"""What the machine's allocators keep for later; knows nothing of what it was allocated for."""

from __future__ import annotations

import gc

import torch

from megatron_policy.device import is_accelerated


def release_cached() -> None:
    """Give the driver the device memory that is cached and unused, so that other processes find it;
    on the CPU nothing: freed memory goes back by itself.
    """
    if is_accelerated():
        gc.collect()
        torch.cuda.empty_cache()


def allocated() -> int:
    """Bytes of device memory that live tensors of this process occupy; 0 on the CPU, which does not
    count them.
    """
    return torch.cuda.memory_allocated() if is_accelerated() else 0
