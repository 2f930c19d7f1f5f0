"""Saves the learning-rate schedule's position as plain values and restores it; the schedule itself
comes from the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_policy.engines.megatron.optimizer import WrappedModel
from megatron_policy.errors import CheckpointError

_SETTINGS = (
    "init_lr",
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_steps",
    "wd_incr_style",
)


def schedule_state(model: WrappedModel) -> dict[str, Any]:
    """`num_steps`, the samples that the schedule has counted, and its settings by Megatron-Core's
    names: numbers and strings.
    """
    scheduler = model.scheduler
    return {"num_steps": scheduler.num_steps} | {n: getattr(scheduler, n) for n in _SETTINGS}


def restore_schedule(
    model: WrappedModel, state: Mapping[str, Any]
) -> dict[str, tuple[object, object]]:
    """Continue from the sample at which `state` was taken, by the configuration's own schedule,
    which sets all groups' rates.

    Returns the settings that differ, each as (in `state`, configured); None means that `state`
    lacks it. CheckpointError without a count.
    """
    steps = state.get("num_steps")
    if not isinstance(steps, int) or steps < 0:
        raise CheckpointError(
            f"the checkpoint does not say how far its schedule has come: num_steps is {steps!r}. "
            "Load another checkpoint, or load this one with fresh_optimizer"
        )
    configured = schedule_state(model)
    # Set directly: Megatron-Core's own load adds to the count and takes rates from the file.
    model.scheduler.num_steps = steps
    model.scheduler.step(increment=0)
    saved = {name: state.get(name) for name in _SETTINGS}
    return {n: (saved[n], configured[n]) for n in _SETTINGS if saved[n] != configured[n]}
