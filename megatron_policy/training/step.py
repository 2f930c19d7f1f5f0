"""One optimizer step: either all ranks take it, or none does and all raise the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from megatron_policy.config import RolloutMismatchConfig
from megatron_policy.device.random_states import remember as keep_random_states
from megatron_policy.device.timing import Stopwatch
from megatron_policy.errors import ConfigError, LossError
from megatron_policy.interfaces.engine import Loss, NotFiniteError, Trainable, TrainingEngine
from megatron_policy.interfaces.loss import LossFunction
from megatron_policy.lm_head.output import Output
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.policy_state import PolicyState
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.training.batching import Batcher, GlobalBatch
from megatron_policy.training.empty_steps import EmptySteps
from megatron_policy.training.loss_faults import (
    LossFault,
    any_fault,
    check_finite,
    locate_faults,
    raise_everywhere,
)
from megatron_policy.training.losses import (
    Metrics,
    ValidCounts,
    evaluate_loss,
    mtp_losses,
    to_plain_metrics,
    weigh_rows,
)
from megatron_policy.training.results import OptimStats
from megatron_policy.training.rollout_mismatch import MismatchMeter, join_on_host
from megatron_policy.training.speed import FORWARD_BACKWARD, STEP

_log = logging.getLogger(__name__)

T = TypeVar("T")

UNCHANGED = (
    "No weight, optimizer state, schedule or random number has changed, and the policy remains "
    "usable."
)

NEEDS_OPTIMIZER = (
    "needs an optimizer, but this policy was made with init_optimizer=False: leave that out, or "
    "pass eval_mode=True to train() for losses alone"
)

OVERFLOW = "gradients overflow float16"
"""Why a step is skipped that a lower factor on losses can help."""


@dataclass(frozen=True)
class Rollback:
    """Random numbers and the engine's volatile buffers as they were when this was made.

    Dropout and losses draw random numbers, possibly more on some ranks than on others. Routers
    count in every forward pass, before the gradient norm is known.
    """

    draw_again: Callable[[], None]
    buffers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def here(cls, engine: TrainingEngine, *, draws: bool = True) -> Rollback:
        """Record the current state. Without `draws` random numbers go on where they are."""
        buffers = tuple((live, live.clone()) for live in engine.volatile_buffers())
        return cls(keep_random_states(engine) if draws else lambda: None, buffers)

    def __call__(self) -> None:
        """Restore what was recorded."""
        self.draw_again()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore the volatile buffers only, not the random numbers."""
        for live, before in self.buffers:
            live.copy_(before)


@dataclass(frozen=True)
class Training:
    """What the steps of a policy work with; `stepped` is called after each that is taken."""

    engine: TrainingEngine
    batcher: Batcher
    memory: DeviceMemory
    state: PolicyState
    empty_steps: EmptySteps
    mismatch: RolloutMismatchConfig
    stepped: Callable[[], object]

    def trainable(self, operation: str) -> Trainable:
        """What `operation` trains; ConfigError without an optimizer."""
        if self.engine.trainable is None:
            raise ConfigError(f"{operation} {NEEDS_OPTIMIZER}")
        return self.engine.trainable


class Step:
    """One optimizer step, from no gradients to new weights or to nothing. Gradients of microbatches
    are added, at once or in several parts; `finish` takes the step, `abort` drops it. After an
    error its gradients are incomplete, and it can only be dropped. Every method is collective.
    """

    def __init__(
        self, training: Training, operation: str, *, gives_back_draws: bool = True
    ) -> None:
        """Begin without gradients. ConfigError without an optimizer, or while a step is open.

        If the step fails or is skipped, random numbers go back to where it began, also those that
        callers drew between its parts; unless `gives_back_draws`, only a part that fails gives back
        its own.
        """
        self._training, self._trainable = training, training.trainable(operation)
        training.state.begin_step(operation)
        try:
            self._trainable.zero_gradients()
            self._undo = Rollback.here(training.engine, draws=gives_back_draws)
        except BaseException:
            training.state.end_step(operation)
            raise
        self._open = True
        self.reduced = False
        """Whether gradients are those of all data-parallel ranks, so that no more can be added."""
        self.failed = ""
        """What has failed, with which error."""

    @contextmanager
    def adding(self, part: str, *, reduce: bool) -> Iterator[None]:
        """In this context, a `part` of the step, the engine makes gradients. They are reduced over
        data-parallel ranks at its end, or, with `reduce` false, when the step is finished. After an
        error random numbers are those before the part.
        """
        draw_again = keep_random_states(self._training.engine)
        with self._marking(part):
            try:
                with nullcontext() if reduce else self._trainable.accumulating():
                    yield
            except BaseException:
                # A loss that fails can have drawn more numbers on some ranks than on others.
                draw_again()
                raise
        self.reduced = reduce

    def finish(
        self,
        factor: float = 1.0,
        *,
        faults: Sequence[LossFault] = (),
        consequence: str = UNCHANGED,
        nothing_counts: str = "",
    ) -> OptimStats:
        """Reduce gradients times `factor` if they are not reduced yet, clip, update the parameters,
        and report; every rank gets the whole model's gradient norm.

        If `nothing_counts`, which then says why and is the same on every rank, the step is skipped.
        If the gradient is not finite, gradients are dropped and the step's other changes are
        undone. Where that can be an overflow of float16, which a lower factor on losses prevents,
        the step is skipped. Otherwise LossError, on every rank, that ends with `consequence`, and
        always if any rank has `faults`, which leave no finite gradient.
        """
        engine, stopwatch = self._training.engine, self._trainable.stopwatch
        with self._marking("its end"):
            if not self.reduced:
                with stopwatch.timing(FORWARD_BACKWARD):
                    self._trainable.reduce_gradients(factor)
            with stopwatch.timing(STEP), engine.recorder.span(STEP):
                stats = self._take(faults, consequence, nothing_counts)
        self.close()
        if not stats.skipped:
            self._training.stepped()
        return stats

    def _take(
        self, faults: Sequence[LossFault], consequence: str, nothing_counts: str
    ) -> OptimStats:
        trainable, groups = self._trainable, self._training.engine.groups
        lr, wd, norm = trainable.lr, trainable.weight_decay, 0.0
        if not nothing_counts:
            try:
                norm = trainable.step()
            except NotFiniteError as error:
                norm = error.norm
            else:
                assert not faults, "a loss that cannot be trained on leaves no finite gradient"
                return OptimStats(norm, lr, wd, trainable.routing_metrics(), trainable.loss_scale)
        trainable.zero_gradients()
        self._undo()
        if any_fault(faults, groups):
            raise_everywhere(faults, groups, consequence)
        factor, reason = trainable.loss_scale, nothing_counts or OVERFLOW
        if nothing_counts:
            _log.warning("a step was skipped: %s in its global batch", nothing_counts)
        elif trainable.skip_step():
            _log.warning(
                "a step was skipped: its gradient's norm is %s at loss scale %g, and %g is next",
                norm,
                factor,
                trainable.loss_scale,
            )
        else:
            overflow = ""
            if factor is not None:
                overflow = (
                    f" Or gradients overflow float16 at loss scale {factor:g}, which the "
                    "configuration does not let become smaller: lower "
                    "megatron_cfg.optimizer.loss_scale or min_loss_scale, or set policy.precision "
                    "to bfloat16."
                )
            raise LossError(
                f"the gradient's norm is {norm}, although the loss is finite everywhere: look for "
                "a derivative that is not, such as that of a root or a logarithm at 0 or of an "
                "exponential that overflows, also where a mask multiplies it by 0 afterwards."
                f"{overflow} {consequence}"
            )
        return OptimStats(norm, lr, wd, loss_scale=trainable.loss_scale, skipped=(reason,))

    def abort(self) -> None:
        """Drop the step and its gradients; weights, optimizer and schedule are as before the step.
        Of a step that has not failed, random numbers are not given back.
        """
        self._trainable.zero_gradients()
        (self._undo if self.failed else self._undo.restore_buffers)()
        self.close()

    def close(self) -> None:
        """End the step, whatever its gradients are. A second call does nothing."""
        if self._open:
            self._open = False
            self._training.state.end_step("step()")

    @contextmanager
    def _marking(self, part: str) -> Iterator[None]:
        """If the body raises, the step has failed."""
        try:
            yield
        except BaseException as error:
            self.failed = f"{part} failed with {type(error).__name__}"
            raise


@dataclass(frozen=True)
class BatchLosses:
    """One global batch on one data-parallel rank, the same on all stages: its loss summed over
    microbatches, the metrics and faults of each, and the part of all in the rollouts' mismatch.
    """

    loss: float
    metrics: tuple[Metrics, ...]
    faults: tuple[LossFault, ...]
    mismatch: list[float] | None


Kept = tuple[torch.Tensor, Metrics, list[LossFault], torch.Tensor | None]
"""A microbatch's loss, metrics and faults, and its part in the rollouts' mismatch."""


def run_batch(
    engine: TrainingEngine,
    batch: GlobalBatch,
    loss_fn: LossFunction,
    counts: ValidCounts,
    stopwatch: Stopwatch,
    number: int = 0,
    mismatch: MismatchMeter | None = None,
    *,
    forward_only: bool = False,
) -> BatchLosses:
    """`run` the microbatches of `batch`, the `number`-th of a call, and share the results with all
    stages. What the schedule takes is timed as `forward_backward`. The rollouts' mismatch is
    measured, and added, where it is given.
    """
    with stopwatch.timing(FORWARD_BACKWARD):
        kept = run(engine, batch.microbatches, loss_fn, counts, mismatch, forward_only=forward_only)
    found = None
    if engine.is_last_stage:
        losses = [float(value) for value, *_ in kept]
        faults = [
            own or check_finite(loss_fn, loss)
            for loss, (_, _, own, _) in zip(losses, kept, strict=True)
        ]
        located = locate_faults(engine, batch.microbatches, faults, number)
        metrics = tuple(to_plain_metrics(each) for _, each, *_ in kept)
        part = join_on_host([each for *_, each in kept])
        found = BatchLosses(sum(losses), metrics, tuple(located), part)
    shared = engine.share_object(found)
    if mismatch is not None:
        mismatch.add(shared.mismatch)
    return shared


def run(
    engine: TrainingEngine,
    microbatches: Sequence[Microbatch],
    loss_fn: LossFunction,
    counts: ValidCounts,
    mismatch: MismatchMeter | None,
    *,
    forward_only: bool,
) -> list[Kept]:
    """Run microbatches through the schedule, with the loss divided by `counts`. Returns, on the
    last stage, what is kept of each that is not a dummy.

    Gradients are summed over microbatches and data-parallel ranks: if `counts` are those of the
    global batch, the sum is the gradient of its loss. A loss that fails does not stop any rank: it
    makes the gradients NaN on every rank.
    """

    def loss(output: Output) -> tuple[torch.Tensor, Kept]:
        faults: list[LossFault] = []
        measured = None if mismatch is None else mismatch.of_microbatch(output)
        watch = None if measured is None else measured.watch
        value, metrics = evaluate_loss(
            loss_fn, output, counts, engine.vocab_size, engine.groups, faults, watch
        )
        part = None if measured is None else measured.read()
        # The schedule scales the value it differentiates in place.
        kept = value.detach().clone()
        mtp_loss, named = mtp_losses(output, counts)
        return value + mtp_loss, (kept, metrics | named, faults, part)

    return run_weighted(engine, microbatches, loss, loss_fn, counts, forward_only=forward_only)


def run_weighted(
    engine: TrainingEngine,
    microbatches: Sequence[Microbatch],
    loss: Loss[T],
    loss_fn: Callable[..., object],
    counts: ValidCounts,
    *,
    forward_only: bool = False,
) -> list[T]:
    """Run microbatches through the engine, each with what its rows weigh in the losses of routers,
    by `counts` and by what `loss_fn` says of itself.
    """
    if not forward_only and engine.table.architecture.moe is not None:
        microbatches = [
            each if each.dummy else replace(each, shares=weigh_rows(loss_fn, each.data, counts))
            for each in microbatches
        ]
    return engine.forward_backward(microbatches, loss, forward_only=forward_only)
