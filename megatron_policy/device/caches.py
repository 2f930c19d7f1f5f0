"""The caches of the machine's allocators."""

from __future__ import annotations

import gc

import torch

from megatron_policy.device import is_accelerated


def release_cached() -> None:
    """Return cached, unused device memory to the driver, so that other processes can use it; on the
    CPU do nothing: freed memory is returned by itself.
    """
    if is_accelerated():
        gc.collect()
        # An exported buffer that no process has opened would keep its memory.
        torch.cuda.ipc_collect()
        return_unused()


def return_unused() -> None:
    """The same for what is unused already: unreachable cycles and exported buffers stay."""
    if is_accelerated():
        torch.cuda.empty_cache()


def allocated() -> int:
    """Bytes of device memory that live tensors of this process occupy; 0 on the CPU, which does not
    count them.
    """
    return torch.cuda.memory_allocated() if is_accelerated() else 0
