"""One rank's part of a Megatron-Core model, as `interfaces.engine.TrainingEngine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_policy.converters.table import Table
from megatron_policy.device import current_device
from megatron_policy.device.process_groups import forget_groups
from megatron_policy.device.timing import Recorder
from megatron_policy.engines.megatron.adapters import MegatronAdapters
from megatron_policy.engines.megatron.build import held_layers
from megatron_policy.engines.megatron.generate import CachedPipeline, inference_mode
from megatron_policy.engines.megatron.layers.balancing import Balancing
from megatron_policy.engines.megatron.layers.experts import forget_routing
from megatron_policy.engines.megatron.optimizer_shards import resident_tensors
from megatron_policy.engines.megatron.pipeline import Pipeline
from megatron_policy.engines.megatron.process_groups import drop_groups
from megatron_policy.engines.megatron.trainable import MegatronTrainable
from megatron_policy.engines.shared import collect_storages
from megatron_policy.interfaces.engine import Loss, NewCache
from megatron_policy.lm_head.output import Output
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.memory.states import Storages
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import Held

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
