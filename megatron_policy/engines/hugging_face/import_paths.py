"""Optimizers and schedules of torch by import path, and schedules that follow one another."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from megatron_policy.config import PolicyConfig
from megatron_policy.config.fsdp import SinglePytorchSchedulerConfig
from megatron_policy.errors import ConfigError

DEFAULT = "torch.optim.AdamW"
"""The optimizer where none is asked for."""


def imported(path: str, kind: type, key: str) -> Any:
    """The class at an import path; ConfigError unless it is a subclass of `kind`."""
    module, _, name = path.rpartition(".")
    fix = f"give a path such as {_SUCH_AS[kind]}"
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"policy.{key}={path!r} cannot be imported: {error}; {fix}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"policy.{key}={path!r} is no class of torch's {kind.__name__}: {fix}")
    return found


_SUCH_AS = {
    torch.optim.Optimizer: DEFAULT,
    LRScheduler: "torch.optim.lr_scheduler.LinearLR",
}


def make(path: str, kind: type, key: str, *args: Any, **kwargs: Any) -> Any:
    """An object of the class at an import path; ConfigError, naming `key`, if it cannot be made."""
    cls = imported(path, kind, f"{key}.name")
    try:
        return cls(*args, **kwargs)
    except (TypeError, ValueError, ArithmeticError, NotImplementedError) as error:
        why = str(error) or "it is abstract"
        raise ConfigError(
            f"policy.{key}.kwargs: {path} does not take {kwargs}: {why}{_suggest_number(kwargs)}"
        ) from error


def _suggest_number(kwargs: Mapping[str, Any]) -> str:
    """What to write where a number is text."""
    for name, value in kwargs.items():
        if isinstance(value, str):
            with suppress(ValueError):
                return f"; {name} is text: write {float(value)!r} (YAML wants 1.0e-3, not 1e-3)"
    return ""


def make_schedule(config: PolicyConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule of `policy.scheduler`, constant by default; several follow one another at the
    `milestones`. ConfigError if it cannot be made.
    """
    asked = config.scheduler
    if asked is None:
        return LambdaLR(optimizer, lambda step: 1.0)
    listed = asked if isinstance(asked, tuple) else (asked,)
    single = [each for each in listed if isinstance(each, SinglePytorchSchedulerConfig)]
    ends = [at for each in listed if isinstance(each, Mapping) for at in each.get("milestones", [])]
    for each in single:
        if issubclass(imported(each.name, LRScheduler, "scheduler.name"), ReduceLROnPlateau):
            raise ConfigError(
                f"policy.scheduler: {each.name} needs a metric at each step, which training does "
                "not pass: use a schedule of the number of steps"
            )
    made = [make(each.name, LRScheduler, "scheduler", optimizer, **each.kwargs) for each in single]
    if len(ends) != max(len(made) - 1, 0) or not made:
        raise ConfigError(
            f"policy.scheduler has {len(made)} schedules and {len(ends)} milestones: give a "
            "milestone, in training steps, for each schedule after the first"
        )
    if sorted(set(ends)) != ends:
        raise ConfigError(
            f"policy.scheduler has milestones {ends}: give each a later step than the one before"
        )
    return made[0] if len(made) == 1 else SequentialLR(optimizer, made, milestones=ends)


def refuse_schedule(config: PolicyConfig, optimizer: torch.optim.Optimizer) -> None:
    """ConfigError for a schedule that cannot take its first step. The optimizer stays as it is."""
    before = [dict(group) for group in optimizer.param_groups]
    try:
        schedule = make_schedule(config, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no step of training was taken
            schedule.step()
    except (ArithmeticError, TypeError) as error:
        raise ConfigError(
            f"policy.scheduler cannot take a step: {error}. Look at the kwargs of its schedules"
        ) from error
    finally:
        put_back(optimizer, before)


def put_back(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give the optimizer's groups the settings that they had before a schedule was made."""
    for group, start in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in start.items() if name != "params"})
        group.pop("initial_lr", None)
