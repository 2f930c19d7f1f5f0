"""A wrapped model as `interfaces.engine.Trainable`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.config import MegatronConfig
from megatron_policy.engines.megatron import accumulation, schedule_state
from megatron_policy.engines.megatron.optimizer import WrappedModel, wrap_model
from megatron_policy.engines.megatron.optimizer_state import MegatronOptimizerState
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.weights.load import Held


@dataclass(frozen=True)
class MegatronTrainable(WrappedModel):
    """Gradient buffers, optimizer and schedule of Megatron-Core."""

    @property
    def state(self) -> MegatronOptimizerState:
        """See `Trainable`."""
        return MegatronOptimizerState(self)

    @property
    def lr(self) -> float:
        """See `Trainable`."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def weight_decay(self) -> float:
        """See `Trainable`."""
        return float(self.scheduler.get_wd())

    def zero_gradients(self) -> None:
        """See `Trainable`."""
        accumulation.zero_gradients(self)

    def accumulating(self) -> AbstractContextManager[None]:
        """See `Trainable`."""
        return accumulation.accumulating(self)

    def reduce_gradients(self, factor: float) -> None:
        """See `Trainable`."""
        accumulation.reduce_accumulated(self, factor)

    def advance_schedule(self, samples: int) -> None:
        """See `Trainable`."""
        self.scheduler.step(increment=samples)

    def schedule_state(self) -> dict[str, Any]:
        """See `Trainable`."""
        return schedule_state.schedule_state(self)

    def restore_schedule(self, state: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
        """See `Trainable`."""
        return schedule_state.restore_schedule(self, state)


def make_trainable(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    settings: MegatronConfig,
    global_batch_size: int,
    data_parallel_size: int,
    pending_reads: PendingReads,
    held: Held,
) -> MegatronTrainable:
    """Wrap loaded chunks for training; see `wrap_model`."""
    parts = wrap_model(
        chunks, config, settings, global_batch_size, data_parallel_size, pending_reads, held
    )
    return MegatronTrainable(parts.chunks, parts.optimizer, parts.scheduler, parts.pending_reads)
