"""One rank's part of a Megatron-Core model, as `interfaces.engine.TrainingEngine`, and the model
with a cache of keys and values, under tensor and pipeline parallelism.

Shapes: B rows, T positions of prompt and continuation, S positions of one forward pass, D hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.table import Table
from megatron_policy.device import current_device, to_device
from megatron_policy.device.process_groups import forget_groups
from megatron_policy.device.timing import Recorder
from megatron_policy.engines.megatron.adapters import MegatronAdapters
from megatron_policy.engines.megatron.build import held_layers
from megatron_policy.engines.megatron.layers.balancing import Balancing
from megatron_policy.engines.megatron.layers.experts import forget_routing
from megatron_policy.engines.megatron.layers.rope import outgrown
from megatron_policy.engines.megatron.layers.sequences import (
    PromptCache,
    SequenceParams,
    sequence_params,
)
from megatron_policy.engines.megatron.optimizer_shards import resident_tensors
from megatron_policy.engines.megatron.pipeline import Pipeline, hidden_states_of
from megatron_policy.engines.megatron.process_groups import drop_groups
from megatron_policy.engines.megatron.trainable import MegatronTrainable
from megatron_policy.engines.shared import GrowingRows, collect_storages
from megatron_policy.interfaces.engine import Loss, NewCache
from megatron_policy.lm_head.logprobs import gather_vocab
from megatron_policy.lm_head.output import Output
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.memory.states import Storages
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.packing.tokens import padded_layout
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import Held


class CachedPipeline:
    """See `CachedModel`."""

    def __init__(self, pipeline: Pipeline, prompts: BatchedDataDict, positions: int) -> None:
        """See `NewCache`."""
        self._pipeline = pipeline
        self._cache = PromptCache(prompts.size, positions)
        self._prompts = GrowingRows.of(pipeline.embedder, prompts, positions, time=0)
        if (positions_BT := self._prompts.positions) is not None:
            self._cache.positions_TR = positions_BT.transpose(0, 1)

    def logits_after(self, tokens_BT: torch.Tensor, position: int) -> torch.Tensor | None:
        """See `CachedModel`; replicas that use each other's experts call it together."""
        cache = self._cache
        if outgrown(self._pipeline.models, cache.sequence_len_offset, position):
            cache.sequence_len_offset = 0  # recompute the cache for the text so far
            cache.enable_prefill_mode()
        logits_BV = self._relay(tokens_BT[:, cache.sequence_len_offset : position])
        cache.sequence_len_offset = position
        cache.enable_decode_mode()
        return logits_BV

    def _relay(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        """Pass one forward step from chunk to chunk; returns the logits `[B, V]` of the last
        position on the last stage.
        """
        pipeline, (rows, positions) = self._pipeline, tokens_BS.shape
        pp, output = pipeline.groups.pp, None
        sequences = None if self._cache.sequence_len_offset else self._find_blocks(positions)
        chunk: Any
        for chunk in pipeline.models:
            if not chunk.pre_process and pp.size() > 1:
                config = chunk.config
                hidden_SBD = torch.empty(
                    positions,
                    rows,
                    config.hidden_size,
                    dtype=config.params_dtype,
                    device=tokens_BS.device,
                )
                dist.recv(hidden_SBD, group=pp, group_src=(pp.rank() - 1) % pp.size())
                chunk.set_input_tensor(hidden_SBD)
            entering = None
            if chunk.pre_process:
                # What further layers add is left in the cache.
                first = self._cache.sequence_len_offset
                entering, self._cache.deep = self._prompts.enter(tokens_BS, first)
            with hidden_states_of(chunk):
                output = chunk(
                    tokens_BS,
                    None,
                    None,
                    entering,
                    inference_context=self._cache,
                    packed_seq_params=sequences,
                    runtime_gather_output=True,
                )
            if not chunk.post_process:
                dist.send(output.contiguous(), group=pp, group_dst=(pp.rank() + 1) % pp.size())
        if pipeline.head is None or output is None:
            return None
        logits_1BV = pipeline.head.plain.logits(output[-1:])
        return gather_vocab(logits_1BV[0], pipeline.groups.tp)[:, : pipeline.vocab_size]

    def _find_blocks(self, width: int) -> SequenceParams | None:
        """What layers are passed with the first `width` tokens of all rows if some of these see
        later ones, which are all among them; None if there are none.
        """
        if not (blocks_B := self._prompts.blocks):
            return None
        layout = padded_layout(self._prompts.prompts.layout.rows, width, 1, 1).moved(to_device)
        positions_BT = self._prompts.positions
        first_BS = None if positions_BT is None else positions_BT[:, :width]
        return sequence_params(layout, self._pipeline.groups.cp, first_BS, (), blocks_B)


@contextmanager
def inference_mode(pipeline: Pipeline) -> Iterator[None]:
    """Eval mode, and no sequence parallelism: one position cannot be split."""
    for chunk in pipeline.models:
        chunk.eval()
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    modules = [module for chunk in pipeline.models for module in chunk.modules()]
    holders = {id(x): x for m in modules for x in (m, getattr(m, "config", None)) if x is not None}
    switched = [
        (x, name) for x in holders.values() for name in names if getattr(x, name, None) is True
    ]
    for holder, name in switched:
        setattr(holder, name, False)
    try:
        yield
    finally:
        for holder, name in switched:
            setattr(holder, name, True)


T = TypeVar("T")


@dataclass(frozen=True)
class MegatronEngine:
    """A rank's place in the layout and everything it holds there. For the methods see
    `TrainingEngine`.
    """

    place: Placement
    groups: Groups
    table: Table
    held: Held
    source_dtypes: Mapping[str, torch.dtype]
    precision: torch.dtype
    pipeline: Pipeline
    trainable: MegatronTrainable | None
    pending_reads: PendingReads
    adapters: MegatronAdapters | None

    @property
    def joins_replicas(self) -> bool:
        """See `TrainingEngine`: they can use each other's experts."""
        return self.place.topology.joins_replicas

    @property
    def vocab_size(self) -> int:
        return self.pipeline.vocab_size

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    @property
    def recorder(self) -> Recorder:
        return self.pipeline.recorder

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss: Loss[T], forward_only: bool = False
    ) -> list[T]:
        return self.pipeline.forward_backward(microbatches, loss, forward_only)

    def forward(self, microbatches: Sequence[Microbatch], read: Callable[[Output], T]) -> list[T]:
        return self.pipeline.forward(microbatches, read)

    def forward_with_experts(
        self, microbatches: Sequence[Microbatch], read: Callable[[Output], T]
    ) -> tuple[list[T], list[torch.Tensor]]:
        return self.pipeline.forward_with_experts(microbatches, read)

    def share_tensor(self, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        if self.groups.pp.size() == 1:
            assert tensor is not None
            return tensor
        shared = tensor.contiguous() if tensor is not None else torch.empty_like(like)
        dist.broadcast(shared, src=self.groups.last_stage, group=self.groups.pp)
        return shared

    def share_object(self, value: T | None) -> T:
        box: list[Any] = [value]
        if self.groups.pp.size() > 1:
            dist.broadcast_object_list(
                box, src=self.groups.last_stage, group=self.groups.pp, device=current_device()
            )
        result: T = box[0]
        return result

    @contextmanager
    def inference(self) -> Iterator[NewCache]:
        with inference_mode(self.pipeline):
            yield partial(CachedPipeline, self.pipeline)

    def decoder_layers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        return held_layers(self.pipeline.models, self.place)

    def volatile_buffers(self) -> Iterator[torch.Tensor]:
        """Each forward pass adds to what routers have counted since the step began."""
        for model in self.pipeline.models:
            for module in model.modules():
                if isinstance(module, Balancing):
                    yield module.step_sums
                    yield module.favoured_E

    def random_states(self) -> dict[str, torch.Tensor]:
        """The states of Megatron-Core's tracker, cloned because it returns its live tensors."""
        found = get_cuda_rng_tracker().get_states()
        return {name: state.clone() for name, state in found.items()}

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        get_cuda_rng_tracker().set_states(dict(states))

    def storages(self) -> Storages:
        return collect_storages(resident_tensors(self.pipeline.models, self.trainable))

    def forget_gradients(self) -> None:
        if self.trainable is not None:
            self.trainable.optimizer.zero_grad()

    def manages(self, model: object) -> bool:
        chunks = () if self.trainable is None else self.trainable.chunks
        return any(model is each for each in (*self.pipeline.models, *chunks))

    def close(self) -> None:
        """Break the references that would keep the model and its process groups alive."""
        forget_routing(self.pipeline.chunks)
        if self.trainable is not None:
            self.trainable.detach()
        drop_groups()
        forget_groups(self)
