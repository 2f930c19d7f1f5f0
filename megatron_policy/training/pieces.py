"""The pieces of a training step, for callers that have a loop of their own: cut or take
microbatches, run them, step, advance the schedule. `train` is made of them.

Shapes: B rows of a microbatch, S positions of its widest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import to_device
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.engine import Loss, Trainable, TrainingEngine
from megatron_policy.lm_head.output import Output
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.policy_state import PolicyState
from megatron_policy.memory.states import CONTINUE_STEP, FORWARD, TRAIN_STEP
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.training import speed
from megatron_policy.training.batching import Batcher
from megatron_policy.training.callbacks import (
    TokenScores,
    Wanted,
    not_finite,
    raise_callbacks_errors,
    reader,
)
from megatron_policy.training.checks import check_size, check_training_data
from megatron_policy.training.empty_steps import EmptySteps
from megatron_policy.training.faults import Fault
from megatron_policy.training.loss_calls import Call, Wrong, carried
from megatron_policy.training.losses import ValidCounts, further_losses, own_counts, row_shares
from megatron_policy.training.optimizer_step import UNCHANGED, take_step
from megatron_policy.training.replay import Replay
from megatron_policy.training.results import OptimStats
from megatron_policy.training.rollback import Rollback
from megatron_policy.training.sync_microbatches import prepared_together
from megatron_policy.training.temperature import with_temperature

T = TypeVar("T")

FORWARD_BACKWARD, STEP, ZERO, READ = (
    "forward_backward()",
    "step()",
    "zero_gradients()",
    "read()",
)


_INCOMPLETE = f"The gradients are incomplete: call {ZERO}, after which the policy is usable again."


@dataclass
class _Open:
    """A step whose gradients are being made. Those of calls with `reduce=False` are this rank's
    own until the end.
    """

    undo: Rollback
    whole: bool = False
    own: bool = False
    failed: str = ""
    nothing_counts: str = ""
    """Why nothing counts in any of its calls so far; empty if something does."""


class StepPieces:
    """What a training step consists of, and the same for reading. Every method is collective.

    A step is `forward_backward` over its microbatches, which begins without gradients, `step`, and
    `advance_schedule` where the caller's schedule has it; `zero_gradients` drops it. Callers whose
    data come in parts that are normalized at the end use `policy.accumulator`.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        batcher: Batcher,
        memory: DeviceMemory,
        state: PolicyState,
        empty_steps: EmptySteps,
        stepped: Callable[[], object],
    ) -> None:
        """`stepped` is called after each optimizer step."""
        self._memory, self._state, self._stepped = memory, state, stepped
        self.empty_steps = empty_steps
        self.engine, self.batcher = engine, batcher
        self._open: _Open | None = None

    @property
    def last_stage(self) -> bool:
        """Whether callbacks are called on this rank."""
        return self.engine.is_last_stage

    def cut(
        self,
        data: BatchedDataDict,
        micro_batch_size: int,
        *,
        temperature: float | torch.Tensor | None = None,
    ) -> list[Microbatch]:
        """All rows of `data`, in the form `train` takes, in microbatches as the configuration asks
        for them: of `micro_batch_size` rows if they are padded. `Microbatch.rows` numbers them.

        Every data-parallel rank gets the same number; fillers make up the missing ones. BatchError,
        on every one of these ranks, for invalid data.
        """

        def cut(checked: BatchedDataDict) -> list[Microbatch]:
            check_size("micro_batch_size", micro_batch_size)
            return self.batcher.for_part(checked, micro_batch_size).microbatches

        return _cut(self.engine, self.batcher, data, temperature, cut)

    def take(
        self,
        data: BatchedDataDict,
        rows: Sequence[Sequence[int]],
        *,
        temperature: float | torch.Tensor | None = None,
        replay: Replay = Replay.REQUIRED,
    ) -> list[Microbatch]:
        """The caller's own microbatches: the i-th has rows `rows[i]` of `data`, in that order.

        They are packed if the configuration has `sequence_packing`, with `dynamic_batching` padded
        to their own longest row, otherwise padded to S and of equal size. `temperature` is a number
        or one for each row, `[B]`; None is the policy's. `replay` is what becomes of
        `routed_experts` where the policy replays them. Otherwise as `cut`.
        """
        of_rows = partial(self.batcher.of_rows, rows=rows)
        return _cut(self.engine, self.batcher, data, temperature, of_rows, replay)

    def zero_gradients(self) -> None:
        """Drop all gradients, also those of a step that failed. ConfigError without an optimizer,
        or while `accumulator` has a step open.
        """
        trainable = self._trainable(ZERO)
        self._memory.check(ZERO, TRAIN_STEP if self._open is None else CONTINUE_STEP)
        trainable.zero_gradients()
        if self._open is not None:
            # A failed loss can have drawn more random numbers on some ranks than on others.
            undo = self._open.undo
            (undo if self._open.failed else undo.restore_buffers)()
            self._close()

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        loss: Callable[[TokenScores], tuple[torch.Tensor, T]],
        *,
        entropy: bool = False,
        everywhere: bool = False,
        candidates: str = "",
        reduce: bool = True,
    ) -> list[T]:
        """Add the gradients of each microbatch's loss, the scalar that `loss` returns, summed over
        microbatches and data-parallel ranks. Returns what else it returned, in order, on the last
        stage; an empty list on others. The losses of layers for multi-token prediction and of
        routers are added as `train` adds them, as means over the tokens of this call.

        Gradients are reduced over data-parallel ranks at the end. Several calls for one step pass
        `reduce=False`; then `step` reduces, once.

        LossError, on every rank, if a loss raises, returns no scalar that can be differentiated, or
        one that is not finite, on any of them: the gradients are incomplete until `zero_gradients`.
        ConfigError without an optimizer, outside the train state, or for a second call with
        `reduce`.
        """
        trainable, first = self._trainable(FORWARD_BACKWARD), self._open is None
        step, wanted = self._begin(reduce), Wanted(entropy, everywhere, candidates)

        def finish(
            output: Output,
        ) -> tuple[torch.Tensor, tuple[T | None, torch.Tensor, list[Wrong]]]:
            wrong: list[Wrong] = []
            scores = TokenScores.of(output, wanted)
            call = Call(loss, scores.data, scores.tensors, partial(loss, scores), keeps=True)
            value, kept = call.result(wrong)
            further, _ = further_losses(output, counts)
            found = value.detach().clone()
            return carried(value, [output.hidden_TRD]) + further, (kept, found, wrong)

        try:
            counts = _counts(self.engine, microbatches)
            with nullcontext() if reduce else trainable.accumulating():
                kept = run_weighted(self.engine, microbatches, finish, loss, counts)
            wrong = [found or not_finite(loss, float(value)) for _, value, found in kept]
            raise_callbacks_errors(self.engine, microbatches, wrong, _INCOMPLETE)
            if first or step.nothing_counts:
                step.nothing_counts = self.empty_steps.reason(loss, counts)
        except BaseException as error:
            step.failed = type(error).__name__
            raise
        return [each for each, _, _ in kept]  # type: ignore[misc]

    def read(
        self,
        microbatches: Sequence[Microbatch],
        read: Callable[[TokenScores], T],
        *,
        entropy: bool = False,
        everywhere: bool = False,
        candidates: str = "",
    ) -> list[T]:
        """What `read` returns of each microbatch, in evaluation mode and without gradients, as
        `forward_backward` returns it. LossError, on every rank, if it raises on any.
        """
        self._memory.ready(READ, FORWARD)
        finish = reader(read, Wanted(entropy, everywhere, candidates))
        return _read(self.engine, microbatches, self.engine.forward(microbatches, finish))

    def read_with_experts(
        self,
        microbatches: Sequence[Microbatch],
        read: Callable[[TokenScores], T],
        *,
        entropy: bool = False,
        everywhere: bool = False,
    ) -> tuple[list[T], list[torch.Tensor]]:
        """As `read`; also, on every rank, the experts that tokens take in each microbatch but
        fillers, int32 `[B, S, L, K]` in the L layers with experts; -1 beyond the text. BatchError
        for a model without experts.
        """
        self._memory.ready(READ, FORWARD)
        self.batcher.replay.check_has_experts()
        finish = reader(read, Wanted(entropy, everywhere))
        kept, experts = self.engine.forward_with_experts(microbatches, finish)
        return _read(self.engine, microbatches, kept), experts

    def step(
        self,
        faults: Sequence[Fault] = (),
        consequence: str = UNCHANGED,
        *,
        nothing_counts: str | None = None,
    ) -> OptimStats:
        """Clip the gradients and update the parameters. Returns the gradient's norm before
        clipping, the same on every rank, and the rates used.

        LossError, on every rank, if that norm is not finite: nothing has changed but the gradients,
        which are gone. With precision float16 the step is skipped instead where a lower factor on
        losses can help, and it is skipped if nothing counts: by the masks of its microbatches or,
        where given, by `nothing_counts`, which then says why and is empty if something does.
        `OptimStats.skipped` has the reason. ConfigError if there are no gradients, or incomplete
        ones. `faults` are those of a loss that left no finite gradient; errors end with
        `consequence`.
        """
        trainable, step = self._trainable(STEP), self._open
        self._memory.check(STEP, CONTINUE_STEP)
        if step is None:
            raise ConfigError(f"{STEP} has no gradients: call {FORWARD_BACKWARD} first")
        if step.failed:
            raise ConfigError(
                f"{STEP} would take incomplete gradients, since {FORWARD_BACKWARD} failed with "
                f"{step.failed}: call {ZERO} and begin again"
            )
        if step.own:
            trainable.reduce_gradients(1.0)
        nothing = step.nothing_counts if nothing_counts is None else nothing_counts
        of_step = (trainable, self.engine.groups, step.undo, faults, consequence, nothing)
        try:
            with self.engine.recorder.span(speed.STEP):
                stats = take_step(*of_step)
        finally:
            self._close()
        if not stats.skipped:
            self._stepped()
        return stats

    def advance_schedule(self, samples: int) -> float:
        """Advance the schedule of learning rate and weight decay, by 0 samples not at all; returns
        the next step's rate.
        """
        trainable = self._trainable("advance_schedule()")
        if samples:
            trainable.advance_schedule(samples)
        return trainable.lr

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Open a step whose gradients are all made in this context by other means
        than `forward_backward`.
        """
        self._begin(reduce=True)
        try:
            yield
        except BaseException:
            self._close()
            raise

    def _begin(self, reduce: bool) -> _Open:
        """A new step, without gradients, or for one of several calls the open one."""
        step = self._open
        self._memory.check(FORWARD_BACKWARD, TRAIN_STEP if step is None else CONTINUE_STEP)
        if step is None:
            self._state.begin_step(FORWARD_BACKWARD)
            self._trainable(FORWARD_BACKWARD).zero_gradients()
            step = self._open = _Open(Rollback.here(self.engine))
        elif step.whole or reduce or step.failed:
            raise ConfigError(
                f"{FORWARD_BACKWARD} would add to gradients that are reduced or incomplete: call "
                f"{STEP} or {ZERO} first, or pass reduce=False to each of several calls"
            )
        step.whole, step.own = reduce, not reduce
        return step

    def _close(self) -> None:
        self._open = None
        self._state.end_step(STEP)

    def _trainable(self, operation: str) -> Trainable:
        if self.engine.trainable is None:
            raise ConfigError(f"{operation}: this policy was made with init_optimizer=False")
        return self.engine.trainable


def _cut(
    engine: TrainingEngine,
    batcher: Batcher,
    data: BatchedDataDict,
    temperature: float | torch.Tensor | None,
    cut: Callable[[BatchedDataDict], list[Microbatch]],
    replay: Replay = Replay.REQUIRED,
) -> list[Microbatch]:
    def checked() -> tuple[BatchedDataDict, list[Microbatch]]:
        own = check_training_data(with_temperature(data, temperature), engine.vocab_size)
        batcher.longest.check(own)
        own = batcher.replay.prepared(own, replay)
        return own, cut(own)

    (own, parts), most = prepared_together(checked, lambda made: len(made[1]), engine.groups.dp)
    return batcher.filled_up(parts, most, own)


def _read(
    engine: TrainingEngine,
    microbatches: Sequence[Microbatch],
    kept: Sequence[tuple[T | None, list[Wrong]]],
) -> list[T]:
    raise_callbacks_errors(engine, microbatches, [wrong for _, wrong in kept], UNCHANGED)
    return [each for each, _ in kept]  # type: ignore[misc]


def run_weighted(
    engine: TrainingEngine,
    microbatches: Sequence[Microbatch],
    finish: Loss[T],
    loss: Callable[..., object],
    counts: ValidCounts,
    *,
    forward_only: bool = False,
) -> list[T]:
    """Run microbatches through the engine, each with what its rows weigh in the losses of routers,
    by `counts` and by what `loss` says of itself.
    """
    if not forward_only and engine.table.architecture.moe is not None:
        microbatches = [_with_shares(each, loss, counts) for each in microbatches]
    return engine.forward_backward(microbatches, finish, forward_only=forward_only)


def _with_shares(
    microbatch: Microbatch, loss: Callable[..., object], counts: ValidCounts
) -> Microbatch:
    if microbatch.filler:
        return microbatch
    return replace(microbatch, shares=row_shares(loss, microbatch.data, counts))


def _counts(engine: TrainingEngine, microbatches: Sequence[Microbatch]) -> ValidCounts:
    """Valid sequences and tokens of all microbatches of all data-parallel ranks."""
    real = [own_counts(each.host.data) for each in microbatches if not each.filler]
    counts = to_device(sum(real, torch.zeros(2)))
    dist.all_reduce(counts, group=engine.groups.dp)
    return ValidCounts(sequences=counts[0], tokens=counts[1])
