"""A loss tried on a few rows before training: what it is given and returns, and whether it keeps to
what training relies on.

Everything is computed from one forward pass over a few rows, in evaluation mode, and from what a
loss is given backwards: no gradient of the model is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import to_device
from megatron_policy.interfaces.loss import LossFunction, LossType
from megatron_policy.lm_head.output import Output
from megatron_policy.packing.microbatch import Microbatch, counted
from megatron_policy.training.checks import rows_per_group
from megatron_policy.training.loss_calls import check_loss, try_loss
from megatron_policy.training.loss_faults import LossFault, check_finite, name_of, raise_faults
from megatron_policy.training.losses import (
    ValidCounts,
    add_results,
    call_loss,
    count_own,
    list_loss_inputs,
    select_differentiable,
    to_plain_metrics,
)
from megatron_policy.training.step import UNCHANGED, Rollback, Training
from megatron_policy.training.sync_microbatches import prepare_together

CLOSE = 1e-3
"""Gradients of the same rows that differ by more, relative to the largest, differ on purpose: they
are fp32 and made from the same numbers.
"""


@dataclass(frozen=True)
class DryRun:
    """What a loss made of a few rows of this replica's data; `print` shows it as text.

    `inputs` has dtype and shape of all that the loss was given, `gradients` the norm of the loss's
    gradient with respect to each input that has one. `warnings` say what training relies on and
    this loss does not keep; none is expected.
    """

    rows: tuple[int, ...]
    tokens: int
    """Next tokens that count in these rows."""
    loss: float
    metrics: Mapping[str, Any]
    inputs: Mapping[str, str]
    gradients: Mapping[str, float]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        own = list(dict.fromkeys(self.rows))
        rows = f"row{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
        rows += ", taken twice" if len(own) < len(self.rows) else ""
        lines = [f"dry run on {rows}: loss {self.loss:.6g}, {self.tokens} tokens count"]
        lines += [f"  given {name}: {shape}" for name, shape in self.inputs.items()]
        lines += [f"  metric {name}: {value}" for name, value in self.metrics.items()]
        lines += [f"  gradient of {name}: norm {n:.3g}" for name, n in self.gradients.items()]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Evaluated:
    """A call of the loss: its value, its metrics, its gradient with respect to each input, and what
    is wrong. `failed` is whether it raised or broke its contract.
    """

    value: torch.Tensor
    metrics: Mapping[str, Any]
    gradients: Mapping[str, torch.Tensor]
    faults: tuple[LossFault, ...]
    failed: bool

    def is_multiple(self, factor: float, other: Mapping[str, torch.Tensor]) -> bool:
        """Whether its gradients are `factor` times these."""
        pairs = [(own, other[name] * factor) for name, own in self.gradients.items()]
        largest = max(float(own.abs().max()) for own, _ in pairs)
        return all(float((own - each).abs().max()) <= CLOSE * largest for own, each in pairs)


@dataclass(frozen=True)
class _LossCall:
    """One call of a loss: its rows, the numbers it differentiates, and all of its arguments.
    `draw_again` restores the random numbers before it.
    """

    loss_fn: LossFunction
    data: BatchedDataDict
    numbers: Mapping[str, torch.Tensor]
    arguments: Mapping[str, Any]
    draw_again: Callable[[], None]

    def cut_rows(self, first: int, last: int) -> _LossCall:
        """The same for a range of the rows."""
        numbers = {name: each[first:last] for name, each in self.numbers.items()}
        return replace(self, data=self.data.slice(first, last), numbers=numbers)

    def evaluate(self, counts: ValidCounts, factors: tuple[int, int] = (1, 1)) -> _Evaluated:
        """Call the loss, with `factors` times the counts, and differentiate it."""
        self.draw_again()
        leaves = {name: each.detach().requires_grad_() for name, each in self.numbers.items()}
        counts = ValidCounts(counts.sequences * factors[0], counts.tokens * factors[1])
        given, arguments = list(leaves.values()), {**self.arguments, **leaves}
        call = partial(call_loss, self.loss_fn, self.data, arguments, counts)
        faults: list[LossFault] = []
        with torch.enable_grad():
            value, metrics = try_loss(self.loss_fn, call, self.data, given, faults)
            found = torch.autograd.grad(value, given, allow_unused=True)
        gradients = {
            name: torch.zeros_like(leaf) if each is None else each
            for (name, leaf), each in zip(leaves.items(), found, strict=True)
        }
        failed = bool(faults)
        faults = faults or check_finite(self.loss_fn, float(value))
        odd = [of for of, each in gradients.items() if not bool(each.isfinite().all())]
        if odd and not faults:
            what = (
                f"{name_of(self.loss_fn)} returned {float(value):g}, with a gradient of {odd[0]} "
                "that is not finite: look for the derivative of a root or a logarithm at 0, or of "
                "an exponential that overflows, also where a mask multiplies it by 0 afterwards"
            )
            faults = [LossFault(what=what)]
        return _Evaluated(value.detach(), metrics, gradients, tuple(faults), failed)


def dry_run(training: Training, data: BatchedDataDict, loss_fn: LossFunction) -> DryRun:
    """Try the loss on the first two rows, or groups of rows, of `data` in which a token counts;
    collective. The same row twice, if there is one. Nothing of the policy changes.

    BatchError for data and LossError for a loss that could not be trained on, as in `train`.
    """

    engine, batcher = training.engine, training.batcher

    def prepare() -> tuple[BatchedDataDict, list[int], str]:
        # Without a plan of microbatches.
        plain = BatchedDataDict(dict(data)) if isinstance(data, Mapping) else data
        checked = batcher.for_loss(loss_fn).check(plain, engine.vocab_size, loss_fn)
        check_loss(loss_fn, engine.table.architecture.head)
        nothing = training.empty_steps.reason(loss_fn, ValidCounts(*count_own(checked)))
        return checked, choose_rows(checked, loss_fn), nothing

    (own, rows, nothing), counting = prepare_together(
        prepare, lambda found: not found[2], engine.groups.dp
    )
    microbatches = batcher.fill_up(batcher.of_rows(own, [rows]), 1, own)
    undo = Rollback.here(engine)

    def read(output: Output) -> tuple[DryRun | None, Sequence[LossFault]]:
        calls = [
            _LossCall(loss_fn, own, select_differentiable(arguments), arguments, undo.draw_again)
            for own, arguments in list_loss_inputs(
                loss_fn, output, engine.vocab_size, engine.groups
            )
        ]
        return _try_calls(calls, output.microbatch, "" if counting else nothing)

    try:
        kept = engine.forward(microbatches, read)
        raise_faults(engine, microbatches, [faults for _, faults in kept], UNCHANGED)
    finally:
        undo()
    found = engine.share_object(kept[0][0] if kept else None)
    assert found is not None, "a loss that failed was raised"
    return found


def choose_rows(data: BatchedDataDict, loss_fn: LossFunction) -> list[int]:
    """The first two groups of rows that the loss reads together in which a token counts, twice the
    same if there is one; the first ones if no token counts.
    """
    size = rows_per_group(loss_fn)
    counts = counted(data)[:, 1:].any(1).tolist()
    groups = [range(first, first + size) for first in range(0, max(data.size - size + 1, 1), size)]
    groups = [group for group in groups if any(counts[row] for row in group if row < data.size)]
    groups = (groups or [range(min(size, data.size))])[:2]
    return [*groups[0], *groups[-1]]


def _try_calls(
    calls: Sequence[_LossCall], microbatch: Microbatch, nothing: str
) -> tuple[DryRun | None, Sequence[LossFault]]:
    """What the calls for a microbatch make. `nothing` says why no replica has anything that counts;
    empty if one has.
    """
    own_2 = count_own(microbatch.host.data)
    counts, tokens = ValidCounts(*to_device(own_2.clamp(min=1))), int(own_2[1])
    found = [call.evaluate(counts) for call in calls]
    first, whole = calls[0], found[0]
    warnings = () if whole.failed else tuple(_find_warnings(first, whole, counts, len(calls) == 1))
    if nothing and not whole.failed:
        warnings = (f"train() would skip every step of these data: {nothing} in them", *warnings)
    faults = [each for one in found for each in one.faults]
    if faults:
        return None, faults
    value, metrics = add_results([(each.value, dict(each.metrics)) for each in found])
    norms = {
        name: math.sqrt(sum(float(each.gradients[name].square().sum()) for each in found))
        for name in whole.gradients
    }
    shapes = {f"data[{key!r}]": _describe_value(each) for key, each in first.data.items()}
    shapes |= {name: _describe_value(each) for name, each in first.numbers.items()}
    made = float(value), to_plain_metrics(metrics), shapes, norms, warnings
    return DryRun(microbatch.rows, tokens, *made), []


def _find_warnings(
    call: _LossCall, whole: _Evaluated, counts: ValidCounts, alone: bool
) -> Iterator[str]:
    """What training relies on and the loss does not keep. `alone` is whether all rows are in this
    call, so that they can be cut.
    """
    # All calls come first: a loss may communicate, and ranks see different slices of logits.
    size = call.data.size
    halves = ((0, size // 2), (size // 2, size)) if alone else ()
    parts = [call.cut_rows(*ends).evaluate(counts) for ends in halves]
    both, by_sequences, by_tokens = (
        whole.is_multiple(2.0, call.evaluate(counts, factors).gradients) for factors in _DOUBLED
    )
    if not any(bool(each.any()) for each in whole.gradients.values()):
        yield (
            "nothing is learnt from these rows: the loss's gradient is 0. Look at the masks, and "
            "at what weighs the tokens"
        )
        return
    if parts:
        yield from _compare_parts(whole, parts)
    if not both:
        yield (
            "the loss is not divided by global_valid_seqs or global_valid_toks: its step depends "
            "on how many rows a global batch has"
        )
    level = getattr(call.loss_fn, "loss_type", None)
    level = getattr(level, "value", level)
    for said, other, divisor in (
        (LossType.TOKEN_LEVEL.value, by_sequences, "global_valid_seqs"),
        (LossType.SEQUENCE_LEVEL.value, by_tokens, "global_valid_toks"),
    ):
        if level == said and other:
            yield (
                f"loss_type is {said!r}, but the loss is divided by {divisor} alone: a step "
                "that is trained in parts would be divided by the other"
            )


_DOUBLED = ((2, 2), (2, 1), (1, 2))
"""Factors on the counts of sequences and of tokens, by which a loss is divided."""


def _compare_parts(whole: _Evaluated, parts: Sequence[_Evaluated]) -> Iterator[str]:
    """What is wrong with the loss of both groups of rows in a microbatch each."""
    if faults := [each for part in parts for each in part.faults]:
        yield f"with these rows in two microbatches, this is wrong in one of them: {faults[0].what}"
        return
    joined = {name: torch.cat([part.gradients[name] for part in parts]) for name in whole.gradients}
    if not whole.is_multiple(1.0, joined):
        yield (
            "the loss depends on how rows are cut into microbatches: in one it is "
            f"{float(whole.value):.6g}, in two they add up to "
            f"{sum(float(part.value) for part in parts):.6g}. Divide by global_valid_toks or "
            "global_valid_seqs, not by what a microbatch has, and compare rows with each other "
            "only within a group (rows_per_group)"
        )


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, Sequence) else ""
    return f"{type(value).__name__}{size}"
