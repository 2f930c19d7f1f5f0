"""What both engines do alike: describe a head, check what embeds tokens, leave parameters to a
checkpoint, find memory, and read how far a schedule is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.table import Table
from megatron_policy.device import current_device
from megatron_policy.errors import CheckpointError, ConfigError
from megatron_policy.interfaces.embedder import Embedder
from megatron_policy.lm_head.filters import Filters
from megatron_policy.lm_head.fused import HeadShape
from megatron_policy.memory.states import Kind, Storages
from megatron_policy.weights.load import Held, mark_unfilled

_SHOWN = 5
SMALLEST_BYTES = 1024
"""Smaller storages are never moved: that would free nothing."""


def describe_head(
    config: PolicyConfig, architecture: Architecture, first: int, real: int
) -> HeadShape:
    """The head of a rank that has `real` entries of the vocabulary, from number `first` on."""
    return HeadShape(
        vocab_start=first,
        real=real,
        scale=architecture.logit_scale,
        softcap=architecture.logit_softcap,
        temperature=(config.generation and config.generation.temperature) or 1.0,
        filters=Filters.of_logprobs(config.generation),
    )


def check_embedder(embedder: Embedder, architecture: Architecture) -> None:
    """ConfigError for attachments that the model declares and its embedder does not read."""
    if unread := [key for key in architecture.attachments if key not in embedder.attachments]:
        raise ConfigError(
            f"the model's architecture declares the attachments {', '.join(unread)}, which what "
            "embeds its tokens does not read: the model would be computed as if on text alone. "
            "Leave them out of the family's architecture, or build its engine with an Embedder "
            "that reads them"
        )


def leave_unfilled(
    held: Held, config: PolicyConfig, table: Table, source_dtypes: Mapping[str, torch.dtype]
) -> None:
    """Mark parameters as unfilled; `source_dtypes` are of the checkpoint that is to fill them.
    CheckpointError if it lacks tensors of the model.
    """
    if unknown := sorted(table.hf_shapes().keys() - source_dtypes.keys()):
        raise CheckpointError(
            f"the checkpoint is not of the model {config.model_name}: it does not have "
            f"{', '.join(unknown[:_SHOWN])}. Set policy.model_name to the model it was saved from"
        )
    mark_unfilled(held)


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
