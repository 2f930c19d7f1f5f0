"""Training over global batches: forward-backward, one optimizer step each, complete metrics on
every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.device.timing import Stopwatch
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.interfaces.loss import LossFunction
from megatron_policy.lm_head.output import Output
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.training.batching import Batcher, GlobalBatch
from megatron_policy.training.checks import check_loss_inputs, check_sizes, check_training_data
from megatron_policy.training.faults import Fault, any_fault, raise_everywhere
from megatron_policy.training.loss_calls import Wrong, name_of
from megatron_policy.training.loss_checks import check_loss
from megatron_policy.training.losses import (
    Metrics,
    ValidCounts,
    count_valid,
    evaluate_loss,
    further_losses,
    plain_metrics,
)
from megatron_policy.training.optimizer_step import UNCHANGED, left_by
from megatron_policy.training.pieces import StepPieces, run_weighted
from megatron_policy.training.results import OptimStats, TrainResult, completed, result_of
from megatron_policy.training.rollback import Rollback
from megatron_policy.training.speed import FORWARD_BACKWARD, STEP, SpeedMeter
from megatron_policy.training.sync_microbatches import cut_synchronized

Kept = list[tuple[torch.Tensor, Metrics, list[Wrong]]]
"""The last stage's loss, metrics and faults of each microbatch that is not a filler; empty on other
stages.
"""


@dataclass(frozen=True)
class BatchLosses:
    """One global batch on one data-parallel rank: its loss summed over microbatches, and the
    metrics of each. A fault on any rank makes the gradients NaN on every rank.
    """

    loss: float
    metrics: tuple[Metrics, ...]
    faults: tuple[Fault, ...]
    counts: ValidCounts


def forward_backward(
    engine: TrainingEngine,
    batch: GlobalBatch,
    loss_fn: LossFunction,
    number: int,
    stopwatch: Stopwatch,
    *,
    forward_only: bool,
) -> BatchLosses:
    """Run one global batch (this data-parallel rank's share), the `number`-th of a call, through
    the engine, timed as `forward_backward`.

    Gradients are summed over microbatches and data-parallel ranks; if `forward_only` only the loss
    is computed. The loss divides by global counts, so the sum is the gradient of the global batch's
    loss.
    """
    counts = count_valid(batch.data, engine.groups.dp)
    with stopwatch.timing(FORWARD_BACKWARD):
        kept = run(engine, batch.microbatches, loss_fn, counts, forward_only=forward_only)
    loss, metrics, faults = shared(engine, batch, kept, loss_fn, number)
    return BatchLosses(loss, metrics, faults, counts)


def run(
    engine: TrainingEngine,
    microbatches: Sequence[Microbatch],
    loss_fn: LossFunction,
    counts: ValidCounts,
    *,
    forward_only: bool,
) -> Kept:
    """Run microbatches through the schedule, with the loss divided by `counts`.

    A loss that fails does not stop any rank: see `evaluate_loss`.
    """

    def loss(output: Output) -> tuple[torch.Tensor, tuple[torch.Tensor, Metrics, list[Wrong]]]:
        wrong: list[Wrong] = []
        value, metrics = evaluate_loss(
            loss_fn, output, counts, engine.vocab_size, engine.groups, wrong
        )
        # The schedule scales the value it differentiates in place.
        kept = value.detach().clone()
        further, metrics_of_further = further_losses(output, counts)
        return value + further, (kept, metrics | metrics_of_further, wrong)

    return run_weighted(engine, microbatches, loss, loss_fn, counts, forward_only=forward_only)


def shared(
    engine: TrainingEngine, batch: GlobalBatch, kept: Kept, loss_fn: LossFunction, number: int
) -> tuple[float, tuple[Metrics, ...], tuple[Fault, ...]]:
    """From what `run` kept: the loss summed over the microbatches of `batch`, the `number`-th of a
    call, the metrics of each, and their faults. All stages get the same.
    """
    plain, faults = [], []
    rows = [microbatch.rows for microbatch in batch.microbatches if not microbatch.filler]
    for place, (value, metrics, wrong) in enumerate(kept):
        loss = float(value)
        if not wrong and not math.isfinite(loss):
            wrong = [Wrong(f"{name_of(loss_fn)} returned {loss}, which is not finite")]
        plain.append((loss, plain_metrics(metrics)))
        where = (number, engine.groups.dp.rank(), place, rows[place])
        faults += [Fault(*where, each.what, each.trace) for each in wrong]
    found, heard = engine.share_object((plain, faults) if engine.is_last_stage else None)
    return sum(value for value, _ in found), tuple(metrics for _, metrics in found), tuple(heard)


def sizes_of(config: PolicyConfig, gbs: int | None, mbs: int | None) -> tuple[int, int]:
    """Samples of a global batch and of a microbatch: the caller's, otherwise the config's."""
    return gbs or config.train_global_batch_size, mbs or config.train_micro_batch_size


def train(
    pieces: StepPieces,
    data: BatchedDataDict,
    loss_fn: LossFunction,
    global_batch_size: int,
    micro_batch_size: int,
    *,
    eval_mode: bool = False,
) -> TrainResult:
    """Train on every global batch in `data` (this data-parallel rank's shard of them, in order).

    Each global batch is one optimizer step, and the schedule advances by `global_batch_size`
    samples once, at the end, as the host's does; it stays where it is if no step is taken. A step
    for which nothing counts is skipped (see `EmptySteps`). In `eval_mode` losses and metrics are
    computed and nothing changes.

    Returns a `TrainResult`. BatchError, before anything is computed, for data that cannot be cut,
    on all data-parallel ranks if it is so on one. LossError, on all ranks, for a global batch whose
    loss or gradient cannot be trained on: neither it nor those after it change anything.
    """
    engine, batcher = pieces.engine, pieces.batcher
    meter = SpeedMeter(batcher.estimator, None if eval_mode else engine.trainable)
    batches, meter.workload = cut_synchronized(
        lambda: _cut(engine, batcher, data, loss_fn, global_batch_size, micro_batch_size),
        batcher,
        engine.groups.dp,
    )
    losses: list[float] = []
    counts: list[ValidCounts] = []
    mb_metrics: list[Metrics] = []
    faults: list[Fault] = []
    stats, skipped = OptimStats(grad_norm=0.0, lr=0.0, wd=0.0), tuple[str, ...]()
    undo = Rollback.here(engine)
    for number, batch in enumerate(batches):
        run_batch = partial(forward_backward, engine, batch, loss_fn, number, meter.stopwatch)
        if eval_mode:
            result = run_batch(forward_only=True)
        else:
            with pieces.whole_step():
                result = run_batch(forward_only=False)
            nothing = pieces.empty_steps.reason(loss_fn, result.counts)
            with meter.stopwatch.timing(STEP):
                stats = pieces.step(result.faults, left_by(number), nothing_counts=nothing)
            skipped += stats.skipped
        faults += result.faults
        losses.append(result.loss)
        counts.append(result.counts)
        # The host sums metrics over global batches too.
        mb_metrics += [
            completed(each, lambda _: len(batches), result.counts, stats) for each in result.metrics
        ]
    if eval_mode:
        if any_fault(faults, engine.groups):
            undo()
            raise_everywhere(faults, engine.groups, UNCHANGED)
    elif len(skipped) < len(batches):
        pieces.advance_schedule(global_batch_size)
    stats = replace(stats, skipped=skipped)
    made = result_of(losses, stats, counts, mb_metrics, engine.groups.dp, eval_mode=eval_mode)
    return meter.added_to(made)


def _cut(
    engine: TrainingEngine,
    batcher: Batcher,
    data: BatchedDataDict,
    loss_fn: LossFunction,
    global_batch_size: int,
    micro_batch_size: int,
) -> list[GlobalBatch]:
    """Check data and loss, raising what is wrong with them, and cut the data."""
    check_sizes(global_batch_size, micro_batch_size)
    batcher = batcher.for_loss(loss_fn)
    checked = check_training_data(data, engine.vocab_size, batcher.training)
    batcher.longest.check(checked)
    checked = batcher.replay.prepared(checked)
    check_loss_inputs(loss_fn, checked, engine.vocab_size)
    check_loss(loss_fn, engine.table.architecture.head)
    return batcher.for_training(checked, global_batch_size, micro_batch_size)
