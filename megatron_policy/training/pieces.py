"""The pieces of a training step, for callers that have a loop of their own: cut or take
microbatches, run them, step, advance the schedule.

Shapes: B rows of a microbatch, S positions of its widest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import to_device
from megatron_policy.errors import ConfigError
from megatron_policy.lm_head.output import Output
from megatron_policy.memory.states import CONTINUE_STEP, FORWARD, TRAIN_STEP
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.training.callbacks import TokenScores
from megatron_policy.training.checks import PADDED, check_size
from megatron_policy.training.loss_calls import keep_graph, try_loss
from megatron_policy.training.loss_faults import (
    LossFault,
    check_finite,
    fault_of_exception,
    raise_faults,
)
from megatron_policy.training.losses import ValidCounts, count_own, mtp_losses
from megatron_policy.training.replay import Replay
from megatron_policy.training.results import OptimStats
from megatron_policy.training.step import UNCHANGED, Step, Training, run_weighted
from megatron_policy.training.sync_microbatches import prepare_together
from megatron_policy.training.value_checks import with_temperature

T = TypeVar("T")

FORWARD_BACKWARD, STEP, ZERO, READ = (
    "forward_backward()",
    "step()",
    "zero_gradients()",
    "read()",
)


_INCOMPLETE = f"The gradients are incomplete: call {ZERO}, after which the policy is usable again."


class StepPieces:
    """What a training step consists of, and the same for reading. Every method is collective.

    A step is `forward_backward` over its microbatches, which begins without gradients, `step`, and
    `advance_schedule` where the caller's schedule has it; `zero_gradients` drops it. Callers whose
    data come in parts that are normalized at the end use `policy.accumulator`.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._engine = training, training.engine
        self.empty_steps = training.empty_steps
        self._step: Step | None = None
        self._nothing_counts = ""
        """Why nothing counts in any call of the open step so far; empty if something does."""

    @property
    def last_stage(self) -> bool:
        """Whether callbacks are called on this rank."""
        return self._engine.is_last_stage

    def cut(
        self,
        data: BatchedDataDict,
        micro_batch_size: int,
        *,
        temperature: float | torch.Tensor | None = None,
    ) -> list[Microbatch]:
        """All rows of `data`, in the form `train` takes, in microbatches as the configuration asks
        for them: of `micro_batch_size` rows if they are padded. `Microbatch.rows` numbers them.

        Every data-parallel rank gets the same number; dummies make up the missing ones. BatchError,
        on every one of these ranks, for invalid data.
        """

        def cut(checked: BatchedDataDict) -> list[Microbatch]:
            check_size("micro_batch_size", micro_batch_size)
            return self._training.batcher.for_part(checked, micro_batch_size).microbatches

        return self._cut_together(data, temperature, cut)

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
        to their own longest row, otherwise padded to S and of equal size. They can exceed the
        configuration's budget of tokens, and without `input_lengths` every row has S tokens.
        `temperature` is a number or one for each row, `[B]`; None is the policy's. `replay` is what
        becomes of `routed_experts` where the policy replays them. Otherwise as `cut`.
        """
        of_rows = partial(self._training.batcher.of_rows, rows=rows)
        return self._cut_together(data, temperature, of_rows, replay, PADDED)

    def zero_gradients(self) -> None:
        """Drop all gradients, also those of a step that failed, whose random numbers are then those
        of its beginning. ConfigError without an optimizer, or while `accumulator` has a step open.
        """
        trainable = self._training.trainable(ZERO)
        if self._step is None:
            self._training.memory.check(ZERO, TRAIN_STEP)
            trainable.zero_gradients()
        else:
            self._training.memory.check(ZERO, CONTINUE_STEP)
            self._step.abort()
            self._step = None

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
        engine, first = self._engine, self._step is None
        step = self._step = self._begin(reduce)

        def finish(
            output: Output,
        ) -> tuple[torch.Tensor, tuple[T | None, torch.Tensor, list[LossFault]]]:
            faults: list[LossFault] = []
            scores = TokenScores.of(
                output, entropy=entropy, everywhere=everywhere, candidates=candidates
            )
            call = partial(loss, scores)
            value, kept = try_loss(loss, call, scores.data, scores.tensors, faults, keeps=True)
            mtp_loss, _ = mtp_losses(output, counts)
            found = value.detach().clone()
            return keep_graph(value, [output.hidden_TRD]) + mtp_loss, (kept, found, faults)

        with step.adding(FORWARD_BACKWARD, reduce=reduce):
            # Valid sequences and tokens of all microbatches of all data-parallel ranks.
            real = [count_own(each.host.data) for each in microbatches if not each.dummy]
            numbers = to_device(sum(real, torch.zeros(2)))
            dist.all_reduce(numbers, group=engine.groups.dp)
            counts = ValidCounts(sequences=numbers[0], tokens=numbers[1])
            kept = run_weighted(engine, microbatches, finish, loss, counts)
            faults = [own or check_finite(loss, float(value)) for _, value, own in kept]
            raise_faults(engine, microbatches, faults, _INCOMPLETE)
            if first or self._nothing_counts:
                self._nothing_counts = self.empty_steps.reason(loss, counts)
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
        self._training.memory.ready(READ, FORWARD)
        scores_of = partial(
            TokenScores.of, entropy=entropy, everywhere=everywhere, candidates=candidates
        )
        found = self._engine.forward(microbatches, partial(_try_reading, read, scores_of))
        return self._check_read(microbatches, found)

    def read_with_experts(
        self,
        microbatches: Sequence[Microbatch],
        read: Callable[[TokenScores], T],
        *,
        entropy: bool = False,
        everywhere: bool = False,
    ) -> tuple[list[T], list[torch.Tensor]]:
        """As `read`; also, on every rank, the experts that tokens take in each microbatch but
        dummies, int32 `[B, S, L, K]` in the L layers with experts; -1 beyond the text. BatchError
        for a model without experts.
        """
        self._training.memory.ready(READ, FORWARD)
        self._training.batcher.replay.check_has_experts()
        scores_of = partial(TokenScores.of, entropy=entropy, everywhere=everywhere)
        reading = partial(_try_reading, read, scores_of)
        found, experts = self._engine.forward_with_experts(microbatches, reading)
        return self._check_read(microbatches, found), experts

    def step(self, *, nothing_counts: str | None = None) -> OptimStats:
        """Clip the gradients and update the parameters. Returns the gradient's norm before
        clipping, the same on every rank, and the rates used.

        LossError, on every rank, if that norm is not finite: nothing has changed but the gradients,
        which are gone. With precision float16 the step is skipped instead where a lower factor on
        losses can help, and it is skipped if nothing counts: by the masks of its microbatches or,
        where given, by `nothing_counts`, which then says why and is empty if something does.
        `OptimStats.skipped` has the reason. Random numbers are then those of the step's beginning.
        ConfigError if there are no gradients, or incomplete ones.
        """
        step = self._step
        self._training.trainable(STEP)
        self._training.memory.check(STEP, CONTINUE_STEP)
        if step is None:
            raise ConfigError(f"{STEP} has no gradients: call {FORWARD_BACKWARD} first")
        if step.failed:
            raise ConfigError(
                f"{STEP} would take incomplete gradients, since {step.failed}: call {ZERO} and "
                "begin again"
            )
        nothing = self._nothing_counts if nothing_counts is None else nothing_counts
        try:
            return step.finish(nothing_counts=nothing)
        finally:
            step.close()
            self._step = None

    def advance_schedule(self, samples: int) -> float:
        """Advance the schedule of learning rate and weight decay, by 0 samples not at all; returns
        the next step's rate.
        """
        trainable = self._training.trainable("advance_schedule()")
        if samples:
            trainable.advance_schedule(samples)
        return trainable.lr

    def _begin(self, reduce: bool) -> Step:
        """A new step, without gradients, or for one of several calls the open one."""
        training, step = self._training, self._step
        trainable = training.trainable(FORWARD_BACKWARD)
        training.memory.check(FORWARD_BACKWARD, TRAIN_STEP if step is None else CONTINUE_STEP)
        if step is None:
            trainable.stopwatch.restart()  # nobody reads it
            return Step(training, FORWARD_BACKWARD)
        if step.reduced or reduce or step.failed:
            raise ConfigError(
                f"{FORWARD_BACKWARD} would add to gradients that are reduced or incomplete: call "
                f"{STEP} or {ZERO} first, or pass reduce=False to each of several calls"
            )
        return step

    def _cut_together(
        self,
        data: BatchedDataDict,
        temperature: float | torch.Tensor | None,
        cut: Callable[[BatchedDataDict], list[Microbatch]],
        replay: Replay = Replay.REQUIRED,
        batching: Batching | None = None,
    ) -> list[Microbatch]:
        batcher, engine = self._training.batcher, self._engine

        def prepare() -> tuple[BatchedDataDict, list[Microbatch]]:
            given = with_temperature(data, temperature)
            own = batcher.check(given, engine.vocab_size, replay=replay, batching=batching)
            return own, cut(own)

        (own, parts), most = prepare_together(prepare, lambda made: len(made[1]), engine.groups.dp)
        return batcher.fill_up(parts, most, own)

    def _check_read(
        self,
        microbatches: Sequence[Microbatch],
        found: Sequence[tuple[T | None, list[LossFault]]],
    ) -> list[T]:
        raise_faults(self._engine, microbatches, [faults for _, faults in found], UNCHANGED)
        return [each for each, _ in found]  # type: ignore[misc]


def _try_reading(
    read: Callable[[TokenScores], T],
    scores_of: Callable[[Output], TokenScores],
    output: Output,
) -> tuple[T | None, list[LossFault]]:
    """Call `read` with the scores of a microbatch; what it raises is kept."""
    try:
        return read(scores_of(output)), []
    except Exception as error:
        return None, [fault_of_exception(read, error)]
