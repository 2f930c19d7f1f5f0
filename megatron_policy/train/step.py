"""Training over global batches: forward-backward, one optimizer step each, complete metrics on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import current_device
from megatron_policy.errors import BatchError
from megatron_policy.interfaces import LossFunction
from megatron_policy.model.optimizer import Trainable
from megatron_policy.train.batching import Batcher, GlobalBatch
from megatron_policy.train.checks import (
    check_loss_inputs,
    check_metrics,
    check_sizes,
    check_training_data,
)
from megatron_policy.train.losses import (
    Metrics,
    ValidCounts,
    count_valid,
    evaluate_loss,
    plain_metrics,
)
from megatron_policy.train.output import Output
from megatron_policy.train.pipeline import Pipeline


@dataclass(frozen=True)
class BatchLosses:
    """One global batch on one data-parallel rank: its loss summed over microbatches, and each one's
    metrics.
    """

    loss: float
    metrics: tuple[Metrics, ...]
    counts: ValidCounts


@dataclass(frozen=True)
class OptimStats:
    """One optimizer step: the gradient's L2 norm before clipping, and what the step used."""

    grad_norm: float
    lr: float
    wd: float


def forward_backward(
    pipeline: Pipeline, batch: GlobalBatch, loss_fn: LossFunction, trainable: Trainable | None
) -> BatchLosses:
    """One global batch (this data-parallel rank's share) through the pipeline.

    Gradients are summed over microbatches and data-parallel ranks into `trainable`; without one
    only the loss is computed. The loss divides by global counts, so the sum is the gradient of the
    global batch's loss.
    """
    counts = count_valid(batch.data, pipeline.groups.dp, current_device())

    def loss(output: Output) -> tuple[torch.Tensor, tuple[torch.Tensor, Metrics]]:
        value, metrics = evaluate_loss(
            loss_fn, output, counts, pipeline.vocab_size, pipeline.groups
        )
        # The schedule scales the value it differentiates in place.
        return value, (value.detach().clone(), metrics)

    if trainable is not None:
        for chunk in trainable.chunks:
            chunk.zero_grad_buffer()
        trainable.optimizer.zero_grad()
    kept = pipeline.train(batch.microbatches, loss, forward_only=trainable is None)
    plain = [(float(value), plain_metrics(metrics)) for value, metrics in kept]
    shared = pipeline.share_object(plain if pipeline.is_last_stage else None)
    for _, metrics in shared:
        check_metrics(metrics)
    return BatchLosses(sum(value for value, _ in shared), tuple(m for _, m in shared), counts)


def optim_step(trainable: Trainable) -> OptimStats:
    """Clip, update the parameters, and report; every rank gets the whole model's gradient norm."""
    group = trainable.optimizer.param_groups[0]
    lr, wd = float(group["lr"]), float(trainable.scheduler.get_wd())
    succeeded, grad_norm, _ = trainable.optimizer.step()
    assert succeeded, "only a loss scaler skips steps, and fp16 is refused by the config"
    return OptimStats(grad_norm=float(grad_norm), lr=lr, wd=wd)


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
    they add up to the true values), `rank`.
    """
    data = BatchedDataDict(data)
    sizes = (global_batch_size, micro_batch_size)
    batches = _global_batches(pipeline, batcher, data, loss_fn, *sizes)
    losses: list[float] = []
    mb_metrics: list[Metrics] = []
    stats = OptimStats(grad_norm=0.0, lr=0.0, wd=0.0)
    for batch in batches:
        result = forward_backward(pipeline, batch, loss_fn, trainable)
        if trainable is not None:
            stats = optim_step(trainable)
        losses.append(result.loss)
        mb_metrics += [_complete(m, result.counts, stats, len(batches)) for m in result.metrics]
    if trainable is not None:
        trainable.scheduler.step(increment=global_batch_size)
    return {
        "global_loss": _sum_over_ranks(losses, pipeline.groups.dp),
        "grad_norm": torch.tensor([stats.grad_norm]),
        "all_mb_metrics": _by_name(mb_metrics),
        "rank": dist.get_rank(),
    }


def _global_batches(
    pipeline: Pipeline,
    batcher: Batcher,
    data: BatchedDataDict,
    loss_fn: LossFunction,
    global_batch_size: int,
    micro_batch_size: int,
) -> list[GlobalBatch]:
    """This rank's share of each global batch, as many microbatches on every data-parallel rank.

    BatchError unless the data can be cut, on all of them if it is so on one: none waits for
    another.
    """
    try:
        check_sizes(global_batch_size, micro_batch_size)
        check_training_data(data, pipeline.vocab_size, batcher.training)
        check_loss_inputs(loss_fn, data, pipeline.vocab_size)
        batches = batcher.for_training(data, global_batch_size, micro_batch_size)
    except Exception:
        # Whatever it is: the others would wait, or take the next call's message for this one's.
        _largest([1, 0, 0], pipeline.groups.dp)
        raise
    number = len(batches)
    refused, most, least = _largest([0, number, -number], pipeline.groups.dp)
    if refused:
        raise BatchError("another data-parallel rank has refused its data; its error says why")
    if most != -least:
        raise BatchError(
            f"{number} global batches on this data-parallel rank, but {-least} to {most} on the "
            "ranks: pass every rank the same number"
        )
    counts = _largest([len(batch.microbatches) for batch in batches], pipeline.groups.dp)
    return [
        GlobalBatch(batch.data, batcher.in_step(batch.microbatches, count, data))
        for batch, count in zip(batches, counts, strict=True)
    ]


def _largest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The largest of each number over the group's ranks."""
    found = torch.tensor(numbers, device=current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    largest: list[int] = found.tolist()
    return largest


def _complete(metrics: Metrics, counts: ValidCounts, stats: OptimStats, batches: int) -> Metrics:
    """The host sums metrics over microbatches and global batches; extrema and settings are not
    sums.
    """
    scaled = {
        key: value if "_min" in key or "_max" in key else value / batches
        for key, value in metrics.items()
    }
    return scaled | {
        "lr": stats.lr,
        "wd": stats.wd,
        "global_valid_seqs": counts.sequences.item(),
        "global_valid_toks": counts.tokens.item(),
    }


def _sum_over_ranks(losses: Sequence[float], group: dist.ProcessGroup) -> torch.Tensor:
    total = torch.tensor(losses, dtype=torch.float32, device=current_device())
    dist.all_reduce(total, group=group)
    return total.cpu()


def _by_name(metrics: Sequence[Metrics]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for each in metrics for name in each)
    return {name: [each[name] for each in metrics if name in each] for name in names}
