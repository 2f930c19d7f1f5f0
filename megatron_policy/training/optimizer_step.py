"""The end of a step: either all ranks take it, or none does and all raise the reason."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_policy.errors import LossError
from megatron_policy.interfaces.engine import NotFiniteError, Trainable
from megatron_policy.parallel.groups import Groups
from megatron_policy.training.faults import Fault, any_fault, raise_everywhere
from megatron_policy.training.results import OptimStats
from megatron_policy.training.rollback import Rollback

UNCHANGED = (
    "No weight, optimizer state, schedule or random number has changed, and the policy remains "
    "usable."
)


def take_step(
    trainable: Trainable,
    groups: Groups,
    undo: Rollback,
    faults: Sequence[Fault],
    consequence: str = UNCHANGED,
) -> OptimStats:
    """Clip, update the parameters, and report; every rank gets the whole model's gradient norm.

    LossError, on every rank, if the gradient is not finite, which a fault on any rank causes:
    gradients are dropped and the step's other changes are undone.
    """
    lr, wd = trainable.lr, trainable.weight_decay
    try:
        grad_norm = trainable.step()
    except NotFiniteError as error:
        norm = error.norm
    else:
        assert not faults, "a loss that cannot be trained on leaves no finite gradient"
        return OptimStats(grad_norm, lr, wd, trainable.routing_metrics())
    trainable.zero_gradients()
    undo()
    if any_fault(faults, groups):
        raise_everywhere(faults, groups, consequence)
    raise LossError(
        f"the gradient's norm is {norm}, although the loss is finite everywhere: look for a "
        "derivative that is not, such as that of a root or a logarithm at 0 or of an exponential "
        f"that overflows, also where a mask multiplies it by 0 afterwards. {consequence}"
    )


def left_by(steps: int) -> str:
    """Say what state a step leaves that fails after `steps` others of the same call."""
    if not steps:
        return UNCHANGED
    return (
        f"The {steps} optimizer step(s) already taken are kept, the schedule has not advanced, "
        "and the policy remains usable."
    )
