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
from megatron_policy.layout import microbatches
from megatron_policy.model.optimizer import Trainable
from megatron_policy.train.checks import check_metrics, check_training_data
from megatron_policy.train.losses import ValidCounts, count_valid, evaluate_loss
from megatron_policy.train.pipeline import Pipeline

Metrics = dict[str, Any]


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
    pipeline: Pipeline,
    batch: BatchedDataDict,
    loss_fn: LossFunction,
    micro_batch_size: int,
    trainable: Trainable | None,
) -> BatchLosses:
    """One global batch (this data-parallel rank's share) through the pipeline.

    Gradients are summed over microbatches and data-parallel ranks into `trainable`; without one
    only the loss is computed. The loss divides by global counts, so the sum is the gradient of the
    global batch's loss.
    """
    counts = count_valid(batch, pipeline.groups.dp, current_device())

    def loss(
        logits: torch.Tensor, data: BatchedDataDict
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, Metrics]]:
        value, metrics = evaluate_loss(
            loss_fn,
            logits,
            data,
            counts,
            pipeline.vocab_size,
            pipeline.vocab_start,
            pipeline.groups,
        )
        # The schedule scales the value it differentiates in place.
        return value, (value.detach().clone(), metrics)

    if trainable is not None:
        for chunk in trainable.chunks:
            chunk.zero_grad_buffer()
        trainable.optimizer.zero_grad()
    parts = [mb.to(current_device()) for mb in batch.make_microbatch_iterator(micro_batch_size)]
    kept = pipeline.train(parts, loss, forward_only=trainable is None)
    plain = [(float(value), _plain(metrics)) for value, metrics in kept]
    shared = pipeline.share_object(plain if pipeline.is_last_stage else None)
    for _, metrics in shared:
        check_metrics(metrics)
    return BatchLosses(sum(value for value, _ in shared), tuple(m for _, m in shared), counts)


def _plain(metrics: Metrics) -> Metrics:
    """Metrics as Python numbers, so that they cross processes and pickle small."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in metrics.items()
    }


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
    batches = _global_batches(data, pipeline, global_batch_size, micro_batch_size)
    losses: list[float] = []
    mb_metrics: list[Metrics] = []
    stats = OptimStats(grad_norm=0.0, lr=0.0, wd=0.0)
    for batch in batches:
        result = forward_backward(pipeline, batch, loss_fn, micro_batch_size, trainable)
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
    data: BatchedDataDict, pipeline: Pipeline, global_batch_size: int, micro_batch_size: int
) -> list[BatchedDataDict]:
    """This rank's share of each global batch; BatchError unless everything divides."""
    check_training_data(data, pipeline.vocab_size)
    microbatches(global_batch_size, micro_batch_size, pipeline.topology)
    share = global_batch_size // pipeline.topology.dp
    if data.size % share or not data.size:
        raise BatchError(
            f"{data.size} samples on a data-parallel rank are no whole number of "
            f"global batches, of which each rank has {share} "
            f"samples: pass a multiple of {global_batch_size} samples"
        )
    return [data.get_batch(i, share) for i in range(data.size // share)]


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
