"""The end of a step: either all ranks take it, or none does and all raise the reason."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatron_policy.errors import LossError
from megatron_policy.interfaces.engine import NotFiniteError, Trainable
from megatron_policy.parallel.groups import Groups
from megatron_policy.training.faults import Fault, any_fault, raise_everywhere
from megatron_policy.training.results import OptimStats
from megatron_policy.training.rollback import Rollback

_log = logging.getLogger(__name__)

UNCHANGED = (
    "No weight, optimizer state, schedule or random number has changed, and the policy remains "
    "usable."
)

OVERFLOW = "gradients overflow float16"
"""Why a step is skipped that a lower factor on losses can help."""


def take_step(
    trainable: Trainable,
    groups: Groups,
    undo: Rollback,
    faults: Sequence[Fault],
    consequence: str = UNCHANGED,
    nothing_counts: str = "",
) -> OptimStats:
    """Clip, update the parameters, and report; every rank gets the whole model's gradient norm.

    If `nothing_counts`, which then says why and is the same on every rank, the step is skipped. If
    the gradient is not finite, gradients are dropped and the step's other changes are undone.
    Where that can be an overflow of float16, which a lower factor on losses prevents, the step is
    skipped. Otherwise LossError, on every rank, and always for a fault on any rank.
    """
    lr, wd = trainable.lr, trainable.weight_decay
    if nothing_counts:
        trainable.zero_gradients()
        undo()
        if any_fault(faults, groups):
            raise_everywhere(faults, groups, consequence)
        _log.warning("a step was skipped: %s in its global batch", nothing_counts)
        return OptimStats(0.0, lr, wd, loss_scale=trainable.loss_scale, skipped=(nothing_counts,))
    try:
        grad_norm = trainable.step()
    except NotFiniteError as error:
        norm = error.norm
    else:
        assert not faults, "a loss that cannot be trained on leaves no finite gradient"
        return OptimStats(grad_norm, lr, wd, trainable.routing_metrics(), trainable.loss_scale)
    trainable.zero_gradients()
    undo()
    if any_fault(faults, groups):
        raise_everywhere(faults, groups, consequence)
    factor = trainable.loss_scale
    if trainable.skip_step():
        _log.warning(
            "a step was skipped: its gradient's norm is %s at loss scale %g, and %g is next",
            norm,
            factor,
            trainable.loss_scale,
        )
        return OptimStats(norm, lr, wd, loss_scale=trainable.loss_scale, skipped=(OVERFLOW,))
    overflow = ""
    if factor is not None:
        overflow = (
            f" Or gradients overflow float16 at loss scale {factor:g}, which the configuration "
            "does not let become smaller: lower megatron_cfg.optimizer.loss_scale or "
            "min_loss_scale, or set policy.precision to bfloat16."
        )
    raise LossError(
        f"the gradient's norm is {norm}, although the loss is finite everywhere: look for a "
        "derivative that is not, such as that of a root or a logarithm at 0 or of an exponential "
        f"that overflows, also where a mask multiplies it by 0 afterwards.{overflow} {consequence}"
    )


def left_by(steps: int) -> str:
    """Say what state a step leaves that fails after `steps` others of the same call."""
    if not steps:
        return UNCHANGED
    return (
        f"The {steps} optimizer step(s) already taken are kept, the schedule has not advanced, "
        "and the policy remains usable."
    )
