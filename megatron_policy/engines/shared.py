"""What both engines do alike: describe a head, check what embeds tokens, and let it read rows that
grow, leave parameters to a checkpoint, find memory, and read how far a schedule is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.architecture import SAY_DRAWN, Architecture
from megatron_policy.converters.table import Table
from megatron_policy.device import current_device
from megatron_policy.errors import CheckpointError, ConfigError
from megatron_policy.interfaces.embedder import Embedder, Entering
from megatron_policy.lm_head.filters import Filters
from megatron_policy.lm_head.fused import HeadShape
from megatron_policy.memory.states import Kind, Storages
from megatron_policy.packing.microbatch import Microbatch, padded_microbatch
from megatron_policy.packing.multiples import Multiples
from megatron_policy.packing.tokens import Blocks
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


@dataclass
class GrowingRows:
    """What enters at rows that grow from prompts. What these carry is read once, when their first
    tokens enter.
    """

    embedder: Embedder
    prompts: Microbatch
    """With room for what is to come."""
    time: int
    """The dimension of positions in hidden states."""
    read: Entering | None = None

    @classmethod
    def of(
        cls, embedder: Embedder, prompts: BatchedDataDict, positions: int, time: int
    ) -> GrowingRows:
        """For `prompts` and `positions` as `NewCache` has them."""
        missing = positions - prompts["input_ids"].size(1)
        read = ("input_ids", *(SAY_DRAWN if embedder.attachments else ()))
        wide = {key: F.pad(prompts[key], (0, missing)) for key in read if key in prompts}
        rows = BatchedDataDict({**prompts, **wide})
        alone = Multiples(row=1, sequence=1, context_ranks=1)
        return cls(embedder, padded_microbatch(rows, positions, positions, alone), time)

    @property
    def positions(self) -> torch.Tensor | None:
        """See `Embedder`: of all tokens, those that are to come as well."""
        return self.embedder.positions(self.prompts) if self.embedder.attachments else None

    @property
    def blocks(self) -> Blocks:
        """See `Embedder`: of prompts, since what is to come is text."""
        return self.embedder.find_blocks(self.prompts)

    def enter(self, tokens_BS: torch.Tensor, first: int) -> Entering:
        """What enters at the tokens from position `first` on."""
        hidden, width = self.embedder.embed(tokens_BS), tokens_BS.size(1)
        if not self.embedder.attachments:
            return Entering(hidden)
        if self.read is None:
            self.read = self.embedder.enter(self.prompts.tokens_BS, self.prompts)
        times_S = torch.arange(first, first + width, device=tokens_BS.device)
        inside_BS = times_S < self.prompts.data["input_lengths"].unsqueeze(1)
        inside = (inside_BS if self.time else inside_BS.T).unsqueeze(-1)
        known, *deep = (x.narrow(self.time, first, width) for x in (self.read[0], *self.read[1]))
        return Entering(torch.where(inside, known, hidden), tuple(deep))


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
