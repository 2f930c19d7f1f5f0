"""One optimizer step over data that arrive in parts, normalized by counts that are known only after
the last part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.device import current_device, to_device
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.engine import Trainable, TrainingEngine
from megatron_policy.interfaces.loss import LossFunction
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.policy_state import PolicyState
from megatron_policy.memory.states import CONTINUE_STEP, TRAIN_STEP
from megatron_policy.training.batching import Batcher, GlobalBatch
from megatron_policy.training.checks import check_loss_inputs, check_sizes, check_training_data
from megatron_policy.training.empty_steps import EmptySteps
from megatron_policy.training.faults import any_fault, raise_everywhere
from megatron_policy.training.loss_checks import check_loss
from megatron_policy.training.losses import (
    LossNormalization,
    Metrics,
    ValidCounts,
    own_counts,
)
from megatron_policy.training.optimizer_step import UNCHANGED, take_step
from megatron_policy.training.results import TrainResult, completed, result_of
from megatron_policy.training.rollback import Rollback
from megatron_policy.training.speed import FORWARD_BACKWARD, STEP, SpeedMeter, Workload
from megatron_policy.training.step import run, shared, sizes_of
from megatron_policy.training.sync_microbatches import cut_synchronized

BEGIN, PART, FINISH, ABORT = (
    "begin_train_step()",
    "train_microbatch()",
    "finish_train_step()",
    "abort_train_step()",
)


@dataclass
class OpenStep:
    """What has been accumulated so far: this rank's valid sequences and tokens, and the loss and
    metrics of each microbatch, not yet normalized. Gradients are in their buffers.
    """

    loss_fn: LossFunction
    normalization: LossNormalization
    gbs: int
    mbs: int
    counts: torch.Tensor
    undo: Rollback
    meter: SpeedMeter
    parts: int = 0
    loss: float = 0.0
    metrics: list[Metrics] = field(default_factory=list)
    failed: str = ""

    def check_whole(self, operation: str) -> None:
        """ConfigError once a part has failed half-way: the accumulated gradients are incomplete."""
        if self.failed:
            raise ConfigError(
                f"{operation} would continue with incomplete gradients, since {self.failed}: "
                f"call {ABORT} and begin again"
            )


class GradientAccumulator:
    """Trains one step at a time in parts. Every method is collective.

    Between parts the policy can be used for scoring, and its weights can leave the device and come
    back. Operations that need the step to be finished are refused.
    """

    def __init__(
        self,
        config: PolicyConfig,
        engine: TrainingEngine,
        batcher: Batcher,
        memory: DeviceMemory,
        state: PolicyState,
        empty_steps: EmptySteps,
        stepped: Callable[[], object],
        recorded: Callable[[TrainResult], TrainResult] = lambda result: result,
    ) -> None:
        """`stepped` is called after each optimizer step, `recorded` with what it reports."""
        self._config, self._batcher = config, batcher
        self._memory, self._state = memory, state
        self._engine, self._trainable = engine, engine.trainable
        self._empty, self._stepped, self._recorded = empty_steps, stepped, recorded
        self._step: OpenStep | None = None

    def begin(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Open a step with zero gradients. The schedule will advance by `gbs` samples, however many
        arrive; padded data are cut into microbatches of `mbs` rows. Both default to the config's.

        ConfigError without an optimizer, while a step is open, outside the train state, and for a
        loss that does not declare its normalization, or one that does not fit multi-token
        prediction.
        """
        trainable = self._can_train(BEGIN)
        self._memory.check(BEGIN, TRAIN_STEP)
        gbs, mbs = sizes_of(self._config, gbs, mbs)
        check_sizes(gbs, mbs)
        check_loss(loss_fn, self._engine.table.architecture.head)
        normalization = LossNormalization.of(loss_fn)
        if self._engine.table.architecture.mtp_layers:
            normalization.check_mtp()
        trainable.zero_gradients()
        counts = torch.zeros(2, device=current_device())
        undo = Rollback.here(self._engine)
        meter = SpeedMeter(self._batcher.estimator, trainable)
        self._step = OpenStep(loss_fn, normalization, gbs, mbs, counts, undo, meter)
        self._state.begin_step(BEGIN)
        meter.pause()

    def microbatch(self, data: Mapping[str, Any]) -> None:
        """Add the gradients of `data`: this data-parallel rank's rows, in the form `train` takes.
        The number of rows is arbitrary, can differ between ranks and can be 0. The data can carry
        a plan of one global batch.

        BatchError, on all data-parallel ranks, for invalid data: the step is unchanged and can
        continue with other data. LossError, on all ranks, for a loss that cannot be trained on: as
        after any other error, gradients of part of these data have already been added, so the step
        can only be aborted. A note on the error says so.
        """
        step, trainable = self._opened(PART), self._can_train(PART)
        step.meter.resume()
        self._memory.check(PART, CONTINUE_STEP)
        batch, workload = self._cut(step, data)
        ones, undo = torch.ones(2, device=current_device()), Rollback.here(self._engine)
        with _marking(step, "a part of the step failed"):
            with trainable.accumulating(), step.meter.stopwatch.timing(FORWARD_BACKWARD):
                kept = run(
                    self._engine,
                    batch.microbatches,
                    step.loss_fn,
                    ValidCounts(*ones),
                    forward_only=False,
                )
            loss, metrics, faults = shared(self._engine, batch, kept, step.loss_fn, 0)
            if any_fault(faults, self._engine.groups):
                undo()
                raise_everywhere(faults, self._engine.groups, UNCHANGED)
        step.counts += to_device(own_counts(batch.data))
        step.parts += 1
        step.loss += loss
        step.metrics += metrics
        step.meter.workload += workload
        step.meter.pause()

    def finish(self) -> dict[str, Any]:
        """Divide by the counts of all parts on all ranks, reduce, clip and step. Return what
        `train` returns for one global batch. The step is skipped if nothing counts in any part.

        ConfigError if no step is open or no part was added, and on every rank if a part has failed
        on any; the step stays open. LossError, on every rank, for a gradient that is not finite:
        the step can only be aborted.
        """
        step, trainable = self._opened(FINISH), self._can_train(FINISH)
        step.meter.resume()
        self._memory.check(FINISH, CONTINUE_STEP)
        if not step.parts and not step.failed:
            raise ConfigError(
                f"{FINISH} has nothing to step with: call {PART} first, or {ABORT} instead"
            )
        counts = self._total(step)
        with _marking(step, "its end failed"):
            divisor = step.normalization.gradient(counts)
            undo, nothing = Rollback.here(self._engine), self._empty.reason(step.loss_fn, counts)
            with step.meter.stopwatch.timing(FORWARD_BACKWARD):  # where `train` reduces
                trainable.reduce_gradients(1.0 / divisor)
            with step.meter.stopwatch.timing(STEP), self._engine.recorder.span(STEP):
                stats = take_step(trainable, self._engine.groups, undo, (), nothing_counts=nothing)
            if not stats.skipped:
                trainable.advance_schedule(step.gbs)
        self._close()
        if not stats.skipped:
            self._stepped()
        divisors = step.normalization.divisors(counts)
        metrics = [completed(each, divisors, counts, stats) for each in step.metrics]
        result = result_of([step.loss / divisor], stats, [counts], metrics, self._engine.groups.dp)
        return self._recorded(step.meter.added_to(result))

    def abort(self) -> None:
        """Drop the step and its gradients; weights, optimizer and schedule are as before the step.
        Does nothing if no step is open. Random numbers drawn by dropout are not restored.
        """
        if self._step is None:
            return
        self._can_train(ABORT).zero_gradients()
        self._step.undo.restore_buffers()
        self._close()

    def _close(self) -> None:
        self._step = None
        self._state.end_step(FINISH)

    def _can_train(self, operation: str) -> Trainable:
        if self._trainable is None:
            raise ConfigError(
                f"{operation}: made with init_optimizer=False, this policy only trains in eval_mode"
            )
        return self._trainable

    def _opened(self, operation: str) -> OpenStep:
        if self._step is None:
            raise ConfigError(f"{operation}: no training step is open, call {BEGIN} first")
        return self._step

    def _cut(self, step: OpenStep, data: Mapping[str, Any]) -> tuple[GlobalBatch, Workload]:
        """Cut the part into microbatches, the same number on every data-parallel rank; also what
        all of these ranks compute.
        """
        vocab_size = self._engine.vocab_size

        def cut() -> list[GlobalBatch]:
            step.check_whole(PART)
            if _without_rows(data):
                return [GlobalBatch(_nothing(), [])]
            batcher = self._batcher.for_loss(step.loss_fn)
            checked = check_training_data(data, vocab_size, batcher.training)
            batcher.longest.check(checked)
            checked = batcher.replay.prepared(checked)
            check_loss_inputs(step.loss_fn, checked, vocab_size)
            return [batcher.for_part(checked, step.mbs)]

        (batch,), workload = cut_synchronized(cut, self._batcher, self._engine.groups.dp)
        return batch, workload

    def _total(self, step: OpenStep) -> ValidCounts:
        """Sum the counts over data-parallel ranks; ConfigError if a part has failed on any."""
        failed = torch.tensor([float(bool(step.failed))], device=current_device())
        total = torch.cat([step.counts, failed])
        dist.all_reduce(total, group=self._engine.groups.dp)
        if total[2] and not step.failed:
            step.failed = "a part of the step failed on another rank"
        step.check_whole(FINISH)
        return ValidCounts(sequences=total[0], tokens=total[1])


def _without_rows(data: Mapping[str, Any]) -> bool:
    if not isinstance(data, Mapping):
        return False  # check_training_data refuses it
    tokens = BatchedDataDict(data).get("input_ids")
    plain = tokens if isinstance(tokens, torch.Tensor) and not tokens.is_nested else None
    return not data or (plain is not None and plain.shape[:1] == (0,))


def _nothing() -> BatchedDataDict:
    """An empty batch, for a rank without rows."""
    return BatchedDataDict(
        {"input_ids": torch.zeros(0, 1, dtype=torch.long), "sample_mask": torch.zeros(0)}
    )


@contextmanager
def _marking(step: OpenStep, what: str) -> Iterator[None]:
    """If the body raises, mark the step as incomplete and add a note to the error."""
    try:
        yield
    except BaseException as error:
        step.failed = f"{what} with {type(error).__name__}"
        error.add_note(f"The training step is left open and incomplete: call {ABORT}.")
        raise
