"""Training over global batches: one optimizer step each, complete metrics on every rank."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

from megatron_policy.batch import BatchedDataDict
from megatron_policy.interfaces.loss import LossFunction
from megatron_policy.training.batching import GlobalBatch
from megatron_policy.training.checks import check_sizes
from megatron_policy.training.loss_calls import check_loss
from megatron_policy.training.loss_faults import any_fault, raise_everywhere
from megatron_policy.training.losses import Metrics, ValidCounts, count_valid
from megatron_policy.training.results import OptimStats, TrainResult, complete_metrics, result_of
from megatron_policy.training.rollout_mismatch import MismatchMeter, check_rollouts
from megatron_policy.training.speed import SpeedMeter
from megatron_policy.training.step import (
    UNCHANGED,
    BatchLosses,
    Rollback,
    Step,
    Training,
    run_batch,
)
from megatron_policy.training.sync_microbatches import cut_together

TRAIN = "train()"


def train(
    training: Training,
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
    for which nothing counts is skipped. In `eval_mode` nothing changes.

    BatchError, before anything is computed, for data that cannot be cut, on all data-parallel ranks
    if it is so on one. LossError, on all ranks, for a global batch whose loss or gradient cannot be
    trained on: neither it nor those after it change anything.
    """
    engine, batcher = training.engine, training.batcher
    meter = SpeedMeter(batcher.estimator, None if eval_mode else engine.trainable)
    cut = partial(_cut, training, data, loss_fn, global_batch_size, micro_batch_size)
    batches, meter.workload = cut_together(cut, batcher, engine.groups.dp)
    losses: list[BatchLosses] = []
    counts: list[ValidCounts] = []
    metrics: list[Metrics] = []
    stats, skipped = OptimStats(grad_norm=0.0, lr=0.0, wd=0.0), tuple[str, ...]()
    undo, mismatch = Rollback.here(engine), MismatchMeter(training.mismatch)
    for number, batch in enumerate(batches):
        valid = count_valid(batch.data, engine.groups.dp)
        # Of the weights that the call began with.
        gauge = mismatch if eval_mode or len(skipped) == number else None
        evaluate = partial(run_batch, engine, batch, loss_fn, valid, meter.stopwatch, number, gauge)
        if eval_mode:
            found = evaluate(forward_only=True)
        else:
            with closing(Step(training, TRAIN)) as step:
                with step.adding(TRAIN, reduce=True):
                    found = evaluate()
                nothing = training.empty_steps.reason(loss_fn, valid)
                stats = step.finish(
                    faults=found.faults, consequence=describe_state(number), nothing_counts=nothing
                )
            skipped += stats.skipped
        losses.append(found)
        counts.append(valid)
        # The host sums metrics over global batches too.
        metrics += [
            complete_metrics(each, lambda _: len(batches), valid, stats) for each in found.metrics
        ]
    if eval_mode:
        faults = [fault for each in losses for fault in each.faults]
        if any_fault(faults, engine.groups):
            undo()
            raise_everywhere(faults, engine.groups, UNCHANGED)
    elif len(skipped) < len(batches):
        training.trainable(TRAIN).advance_schedule(global_batch_size)
    values, stats = [each.loss for each in losses], replace(stats, skipped=skipped)
    of_call = (values, stats, counts, metrics, mismatch)
    return meter.add_to(result_of(*of_call, engine.groups.dp, eval_mode=eval_mode))


def _cut(
    training: Training, data: BatchedDataDict, loss_fn: LossFunction, gbs: int, mbs: int
) -> list[GlobalBatch]:
    """Check data and loss, raising what is wrong with them, and cut the data."""
    check_sizes(gbs, mbs)
    batcher, engine = training.batcher.for_loss(loss_fn), training.engine
    checked, head = batcher.check(data, engine.vocab_size, loss_fn), engine.table.architecture.head
    check_rollouts(checked, training.mismatch, head)
    check_loss(loss_fn, head)
    return batcher.for_training(checked, gbs, mbs)


def describe_state(steps: int) -> str:
    """Say what state a step leaves that fails after `steps` others of the same call."""
    if not steps:
        return UNCHANGED
    return (
        f"The {steps} optimizer step(s) already taken are kept, the schedule has not advanced, "
        "and the policy remains usable."
    )
