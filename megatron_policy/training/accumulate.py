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
from megatron_policy.interfaces.loss import LossFunction
from megatron_policy.memory.states import CONTINUE_STEP, TRAIN_STEP
from megatron_policy.training.batching import GlobalBatch
from megatron_policy.training.checks import check_sizes
from megatron_policy.training.loss_calls import check_loss
from megatron_policy.training.loss_faults import any_fault, raise_everywhere
from megatron_policy.training.losses import (
    LossNormalization,
    Metrics,
    ValidCounts,
    count_own,
)
from megatron_policy.training.results import TrainResult, complete_metrics, result_of
from megatron_policy.training.rollout_mismatch import MismatchMeter, check_rollouts
from megatron_policy.training.speed import SpeedMeter
from megatron_policy.training.step import UNCHANGED, Step, Training, run_batch
from megatron_policy.training.sync_microbatches import cut_together

BEGIN, PART, FINISH, ABORT = (
    "begin_train_step()",
    "train_microbatch()",
    "finish_train_step()",
    "abort_train_step()",
)


@dataclass
class _OpenStep:
    """What has been accumulated so far: this rank's valid sequences and tokens, and the loss and
    metrics of each microbatch, not yet normalized. Gradients are in their buffers.
    """

    step: Step
    loss_fn: LossFunction
    normalization: LossNormalization
    gbs: int
    mbs: int
    counts: torch.Tensor
    meter: SpeedMeter
    mismatch: MismatchMeter
    parts: int = 0
    loss: float = 0.0
    metrics: list[Metrics] = field(default_factory=list)

    def check_whole(self, operation: str) -> None:
        """ConfigError once a part has failed half-way: the accumulated gradients are incomplete."""
        if self.step.failed:
            raise ConfigError(
                f"{operation} would continue with incomplete gradients, since {self.step.failed}: "
                f"call {ABORT} and begin again"
            )


class GradientAccumulator:
    """Trains one step at a time in parts. Every method is collective.

    Between parts the policy can be used for scoring, and its weights can leave the device and come
    back. Operations that need the step to be finished are refused.
    """

    def __init__(
        self,
        training: Training,
        config: PolicyConfig,
        recorded: Callable[[TrainResult], TrainResult],
    ) -> None:
        """`recorded` is called with what a step reports, and returns what `finish` returns."""
        self._training, self._config, self._recorded = training, config, recorded
        self._engine = training.engine
        self._current: _OpenStep | None = None

    def begin(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Open a step with zero gradients. The schedule will advance by `gbs` samples, however many
        arrive; padded data are cut into microbatches of `mbs` rows. Both default to the config's.

        ConfigError without an optimizer, while a step is open, outside the train state, and for a
        loss that does not declare its normalization, or one that does not fit multi-token
        prediction.
        """
        trainable = self._training.trainable(BEGIN)
        self._training.memory.check(BEGIN, TRAIN_STEP)
        gbs = gbs or self._config.train_global_batch_size
        mbs = mbs or self._config.train_micro_batch_size
        check_sizes(gbs, mbs)
        check_loss(loss_fn, self._engine.table.architecture.head)
        normalization = LossNormalization.of(loss_fn)
        if self._engine.table.architecture.mtp_layers:
            normalization.check_mtp()
        meter = SpeedMeter(self._training.batcher.estimator, trainable)
        counts = torch.zeros(2, device=current_device())
        step = Step(self._training, BEGIN, gives_back_draws=False)
        mismatch = MismatchMeter(self._training.mismatch)
        self._current = _OpenStep(step, loss_fn, normalization, gbs, mbs, counts, meter, mismatch)
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
        now, engine = self._opened(PART), self._engine

        def cut() -> list[GlobalBatch]:
            """The same number of microbatches on every data-parallel rank."""
            now.check_whole(PART)
            if _has_no_rows(data):
                return [GlobalBatch(_EMPTY, [])]
            batcher = self._training.batcher.for_loss(now.loss_fn)
            checked = batcher.check(data, engine.vocab_size, now.loss_fn)
            head = engine.table.architecture.head
            check_rollouts(checked, self._training.mismatch, head)
            return [batcher.for_part(checked, now.mbs)]

        (batch,), workload = cut_together(cut, self._training.batcher, engine.groups.dp)
        ones = ValidCounts(*torch.ones(2, device=current_device()))
        with _noting_abort(), now.step.adding("a part of the step", reduce=False):
            held = (batch, now.loss_fn, ones, now.meter.stopwatch)
            found = run_batch(engine, *held, mismatch=now.mismatch)
            if any_fault(found.faults, engine.groups):
                raise_everywhere(found.faults, engine.groups, UNCHANGED)
        now.counts += to_device(count_own(batch.data))
        now.parts += 1
        now.loss += found.loss
        now.metrics += found.metrics
        now.meter.workload += workload
        now.meter.pause()

    def finish(self) -> dict[str, Any]:
        """Divide by the counts of all parts on all ranks, reduce, clip and step. Return what
        `train` returns for one global batch. The step is skipped if nothing counts in any part.

        ConfigError if no step is open or no part was added, and on every rank if a part has failed
        on any; the step stays open. LossError, on every rank, for a gradient that is not finite:
        the step can only be aborted.
        """
        now, engine = self._opened(FINISH), self._engine
        if not now.parts and not now.step.failed:
            raise ConfigError(
                f"{FINISH} has nothing to step with: call {PART} first, or {ABORT} instead"
            )
        failed = now.counts.new_tensor([float(bool(now.step.failed))])
        total = torch.cat([now.counts, failed])
        dist.all_reduce(total, group=engine.groups.dp)
        if total[2] and not now.step.failed:
            now.step.failed = "a part of the step failed on another rank"
        now.check_whole(FINISH)
        counts = ValidCounts(sequences=total[0], tokens=total[1])
        divisor = now.normalization.gradient(counts)
        nothing = self._training.empty_steps.reason(now.loss_fn, counts)
        with _noting_abort():
            stats = now.step.finish(1.0 / divisor, nothing_counts=nothing)
        self._current = None
        if not stats.skipped:
            self._training.trainable(FINISH).advance_schedule(now.gbs)
        divisors = now.normalization.divisors(counts)
        metrics = [complete_metrics(each, divisors, counts, stats) for each in now.metrics]
        held = ([now.loss / divisor], stats, [counts], metrics, now.mismatch)
        result = result_of(*held, engine.groups.dp)
        return self._recorded(now.meter.add_to(result))

    def abort(self) -> None:
        """Drop the step and its gradients; weights, optimizer and schedule are as before the step.
        Does nothing if no step is open. Random numbers go on where they are.
        """
        if self._current is not None:
            self._current.step.abort()
            self._current = None

    def _opened(self, operation: str) -> _OpenStep:
        if self._current is None:
            raise ConfigError(f"{operation}: no training step is open, call {BEGIN} first")
        self._current.meter.resume()
        self._training.memory.check(operation, CONTINUE_STEP)
        return self._current


_EMPTY = BatchedDataDict(input_ids=torch.zeros(0, 1, dtype=torch.long), sample_mask=torch.zeros(0))
"""The batch of a rank without rows."""


def _has_no_rows(data: Mapping[str, Any]) -> bool:
    if not isinstance(data, Mapping):
        return False  # refused where it is checked
    tokens = BatchedDataDict(data).get("input_ids")
    plain = tokens if isinstance(tokens, torch.Tensor) and not tokens.is_nested else None
    return not data or (plain is not None and plain.shape[:1] == (0,))


@contextmanager
def _noting_abort() -> Iterator[None]:
    """If the body raises, the error says that the step has to be aborted."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"The training step is left open and incomplete: call {ABORT}.")
        raise
