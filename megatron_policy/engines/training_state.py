"""What both engines answer alike of the state of training: where its memory is, and how far a
schedule is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_policy.device import current_device
from megatron_policy.errors import CheckpointError
from megatron_policy.memory.states import Kind, Storages

SMALLEST_BYTES = 1024
"""Smaller storages are never moved: that would free nothing."""


def collect_storages(tensors: Iterable[tuple[Kind, torch.Tensor]]) -> Storages:
    """The storages of `tensors` that are on the device now, each once and under its first kind, in
    their order. Memory is counted by storage: tensors can be views of one buffer. Those that are in
    host memory, emptied or small are left out.
    """
    seen: set[int] = set()
    found: Storages = {kind: [] for kind in Kind}
    for kind, tensor in tensors:
        storage = tensor.untyped_storage()
        counts = tensor.device == current_device() and storage.nbytes() >= SMALLEST_BYTES
        if counts and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[kind].append(storage)
    return found


def read_samples(state: Mapping[str, Any]) -> int:
    """The samples that a saved schedule has counted; CheckpointError without them."""
    samples = state.get("num_steps")
    if not isinstance(samples, int) or samples < 0:
        raise CheckpointError(
            f"the checkpoint does not say how far its schedule has advanced: num_steps is "
            f"{samples!r}. Load another checkpoint, or load this one with fresh_optimizer"
        )
    return samples
