"""The driver's part in steps trained in parts: dispatches each part to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import ConfigError
from megatron_policy.training.loss_checks import check_loss
from megatron_policy.training.sharding import merged_training
from megatron_policy.workers.driver.monitoring import DriverMonitoring

if TYPE_CHECKING:
    from megatron_policy.config import PolicyConfig
    from megatron_policy.interfaces import LossFunction
    from megatron_policy.training.sharding import BatchDispatcher
    from megatron_policy.workers.cluster.group import WorkerGroup


@dataclass(frozen=True)
class _Begun:
    loss_fn: LossFunction
    mbs: int


class DriverAccumulation(DriverMonitoring):
    """Trains one step at a time in parts, from the driver of the workers.

    Between the parts, log-probabilities can be computed. Anything that needs the step to be over
    (`train`, saving and loading, a refit, freeing gradient buffers) is refused with a ConfigError.
    """

    config: PolicyConfig
    _workers: WorkerGroup
    _dispatcher: BatchDispatcher
    _begun_step: _Begun | None = None

    def begin_train_step(
        self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        """Open a step that advances the schedule by `gbs` samples, however many are passed;
        microbatches have `mbs` rows. Both default to the config's; token-based microbatches need no
        `mbs`. The loss is called with global counts of 1 and divided at the end: docs/losses.md.

        ConfigError while a step is open, without an optimizer, and for a loss without `loss_type`.
        """
        check_loss(loss_fn, self._dispatcher.head)
        self._workers.run_all("begin_train_step", loss_fn=loss_fn, gbs=gbs, mbs=mbs)
        self._begun_step = _Begun(loss_fn, mbs or self.config.train_micro_batch_size)

    def train_microbatch(self, data: Mapping[str, Any]) -> None:
        """Add the gradients of all rows of `data`, which are split over the data-parallel ranks.

        The rows must be whole microbatches, but need not split evenly. After a BatchError or
        ConfigError the step can continue with other data.
        """
        begun = self._begun_step
        if begun is None:
            raise ConfigError(
                "train_microbatch(): no training step is open, call begin_train_step() first"
            )
        if not isinstance(data, Mapping):
            raise ConfigError(f"data is a {type(data).__name__}; pass a BatchedDataDict")
        batch = data if isinstance(data, BatchedDataDict) else BatchedDataDict(data)
        shards = self._dispatcher.to_train_part(batch, begun.loss_fn, begun.mbs)
        self._workers.run_sharded("train_microbatch", data=shards)

    def finish_train_step(self) -> dict[str, Any]:
        """Take the step; return what `train` does for one global batch. ConfigError if no part was
        trained: the step stays open.
        """
        refs = self._workers.submit_all("finish_train_step")
        reporters = self._workers.topology.reporters()
        result = merged_training(self._workers.collect("finish_train_step", refs, reporters))
        self._begun_step = None
        return self._trained(result)

    def abort_train_step(self) -> None:
        """Drop the open step, if any, and its gradients: the policy is as it was before."""
        self._workers.run_all("abort_train_step")
        self._begun_step = None
