"""Training over global batches: forward-backward, one optimizer step each, complete metrics on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.device import current_device
from megatron_policy.interfaces import LossFunction
from megatron_policy.model.accumulation import zero_gradients
from megatron_policy.model.optimizer import Trainable
from megatron_policy.train.batching import Batcher, GlobalBatch
from megatron_policy.train.checks import (
    check_loss_inputs,
    check_metrics,
    check_sizes,
    check_training_data,
)
from megatron_policy.train.in_step import cut_in_step
from megatron_policy.train.losses import (
    Metrics,
    ValidCounts,
    count_valid,
    evaluate_loss,
    plain_metrics,
)
from megatron_policy.train.microbatch import Microbatch
from megatron_policy.train.output import Output
from megatron_policy.train.pipeline import Pipeline
from megatron_policy.train.results import OptimStats, completed, result_of

Kept = list[tuple[torch.Tensor, Metrics]]
"""The last stage's loss and metrics of each microbatch; nothing on other stages."""


@dataclass(frozen=True)
class BatchLosses:
    """One global batch on one data-parallel rank: its loss summed over microbatches, and each one's
    metrics.
    """

    loss: float
    metrics: tuple[Metrics, ...]
    counts: ValidCounts


def forward_backward(
    pipeline: Pipeline, batch: GlobalBatch, loss_fn: LossFunction, trainable: Trainable | None
) -> BatchLosses:
    """One global batch (this data-parallel rank's share) through the pipeline.

    Gradients are summed over microbatches and data-parallel ranks into `trainable`; without one
    only the loss is computed. The loss divides by global counts, so the sum is the gradient of the
    global batch's loss.
    """
    counts = count_valid(batch.data, pipeline.groups.dp, current_device())
    if trainable is not None:
        zero_gradients(trainable)
    kept = run(pipeline, batch.microbatches, loss_fn, counts, forward_only=trainable is None)
    loss, metrics = shared(pipeline, kept)
    return BatchLosses(loss, metrics, counts)


def run(
    pipeline: Pipeline,
    microbatches: Sequence[Microbatch],
    loss_fn: LossFunction,
    counts: ValidCounts,
    *,
    forward_only: bool,
) -> Kept:
    """Microbatches through the schedule, with the loss divided by `counts`."""

    def loss(output: Output) -> tuple[torch.Tensor, tuple[torch.Tensor, Metrics]]:
        value, metrics = evaluate_loss(
            loss_fn, output, counts, pipeline.vocab_size, pipeline.groups
        )
        # The schedule scales the value it differentiates in place.
        return value, (value.detach().clone(), metrics)

    return pipeline.train(microbatches, loss, forward_only=forward_only)


def shared(pipeline: Pipeline, kept: Kept) -> tuple[float, tuple[Metrics, ...]]:
    """The loss summed over the microbatches that `run` kept, and each one's metrics, on every
    stage; BatchError for metrics that cannot be added up.
    """
    plain = [(float(value), plain_metrics(metrics)) for value, metrics in kept]
    found = pipeline.share_object(plain if pipeline.is_last_stage else None)
    for _, metrics in found:
        check_metrics(metrics)
    return sum(value for value, _ in found), tuple(metrics for _, metrics in found)


def optim_step(trainable: Trainable) -> OptimStats:
    """Clip, update the parameters, and report; every rank gets the whole model's gradient norm."""
    group = trainable.optimizer.param_groups[0]
    lr, wd = float(group["lr"]), float(trainable.scheduler.get_wd())
    succeeded, grad_norm, _ = trainable.optimizer.step()
    assert succeeded, "only a loss scaler skips steps, and fp16 is refused by the config"
    return OptimStats(grad_norm=float(grad_norm), lr=lr, wd=wd)


def sizes_of(config: PolicyConfig, gbs: int | None, mbs: int | None) -> tuple[int, int]:
    """Samples of a global batch and of a microbatch: the caller's, or else the config's."""
    return gbs or config.train_global_batch_size, mbs or config.train_micro_batch_size


def train(
    pipeline: Pipeline,
    trainable: Trainable | None,
    batcher: Batcher,
    data: BatchedDataDict,
    loss_fn: LossFunction,
    global_batch_size: int,
    micro_batch_size: int,
) -> dict[str, Any]:
    """Every global batch in `data` (this data-parallel rank's shard of them, one after another).

    With `trainable` each global batch is one optimizer step, and the schedule advances by
    `global_batch_size` samples once, at the end, as the host steps it; without, losses and metrics
    are computed and nothing changes.

    Returns `global_loss` (fp32 `[global batches]`, summed over data-parallel ranks), `grad_norm`
    (fp32 `[1]`, of the last step), `all_mb_metrics` (this data-parallel rank's, a list per name:
    they add up to the true values), `rank`. BatchError, before anything is computed, for data that
    cannot be cut, on all data-parallel ranks if it is so on one.
    """

    def cut() -> list[GlobalBatch]:
        check_sizes(global_batch_size, micro_batch_size)
        checked = check_training_data(data, pipeline.vocab_size, batcher.training)
        batcher.longest.check(checked)
        check_loss_inputs(loss_fn, checked, pipeline.vocab_size)
        return batcher.for_training(checked, global_batch_size, micro_batch_size)

    batches = cut_in_step(cut, batcher, pipeline.groups.dp)
    losses: list[float] = []
    mb_metrics: list[Metrics] = []
    stats = OptimStats(grad_norm=0.0, lr=0.0, wd=0.0)
    for batch in batches:
        result = forward_backward(pipeline, batch, loss_fn, trainable)
        if trainable is not None:
            stats = optim_step(trainable)
        losses.append(result.loss)
        # The host sums metrics over global batches too.
        mb_metrics += [
            completed(each, lambda _: len(batches), result.counts, stats) for each in result.metrics
        ]
    if trainable is not None:
        trainable.scheduler.step(increment=global_batch_size)
    return result_of(losses, stats, mb_metrics, pipeline.groups.dp)
