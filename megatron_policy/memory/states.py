"""The memory states: what each has on the device, and what each permits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from megatron_policy.errors import ConfigError


class Kind(StrEnum):
    """Kinds of memory that a policy has on its device."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


Storages = dict[Kind, list[torch.UntypedStorage]]

ALL = frozenset(Kind)
WEIGHTS = frozenset({Kind.PARAMETERS})
NOTHING: frozenset[Kind] = frozenset()


@dataclass(frozen=True)
class MemoryState:
    """A name and the kinds that are on the device, whole and usable, in it."""

    name: str
    holds: frozenset[Kind]

    @classmethod
    def of(cls, holds: Collection[Kind]) -> MemoryState:
        """The state for what a policy holds, if no transition has named it."""
        held = frozenset(holds)
        whole = (state for state in (TRAIN, LOGPROB, IDLE) if state.holds == held)
        return next(whole, cls("partial", held))

    def interrupted(self, holds: Collection[Kind]) -> MemoryState:
        """The state after a transition to this one that failed half-way; `holds` are the kinds that
        are whole.
        """
        return MemoryState(f"interrupted on the way to {self.name}", frozenset(holds))

    def __str__(self) -> str:
        """As used in messages after "the policy is"."""
        if self == IDLE:
            return f"{self.name} (its weights are in host memory)"
        return f"in state {self.name!r} (on the device: {list_kinds(self.holds)})"


TRAIN = MemoryState("train", ALL)
LOGPROB = MemoryState("logprob", WEIGHTS)
REFIT = MemoryState("refit", WEIGHTS)
IDLE = MemoryState("idle", NOTHING)
STATES = (TRAIN, LOGPROB, REFIT, IDLE)


@dataclass(frozen=True)
class Requirement:
    """What an operation needs on the device, and the call that brings it there.

    `alone` is whether nothing else is allowed to use the weights meanwhile, `within_step` whether
    the operation can come between the parts of a training step, `writes` whether it can change the
    weights.
    """

    holds: frozenset[Kind]
    what: str
    call: str
    alone: bool = True
    within_step: bool = False
    writes: bool = False


TRAIN_STEP = Requirement(ALL, "the train state", "prepare_for_training()")
CONTINUE_STEP = replace(TRAIN_STEP, within_step=True)
FORWARD = Requirement(
    WEIGHTS,
    "the weights on the device",
    "prepare_for_lp_inference()",
    alone=False,
    within_step=True,
)
CHANGE_WEIGHTS = replace(FORWARD, writes=True)
EXCHANGE_WEIGHTS = replace(CHANGE_WEIGHTS, alone=True)
SAVE = Requirement(
    frozenset({Kind.PARAMETERS, Kind.OPTIMIZER}),
    "weights and optimizer state on the device",
    "prepare_for_training()",
)
SEND_WEIGHTS = Requirement(WEIGHTS, "the weights on the device", "offload_before_refit()")


def check_permits(state: MemoryState, operation: str, need: Requirement) -> None:
    """ConfigError unless `state` holds what `operation` needs; it names the state, the operation
    and the call that fixes it.
    """
    if not need.holds <= state.holds:
        raise ConfigError(
            f"{operation} needs {need.what}; the policy is {state}: call {need.call} first"
        )


def parse_kinds(what: str | Iterable[str]) -> frozenset[Kind]:
    """The kinds that a caller names, one or several; ConfigError for unknown ones."""
    names = [what] if isinstance(what, str) else list(what)
    unknown = sorted({str(name) for name in names} - {str(kind) for kind in Kind})
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} cannot be moved; legal: {list_kinds(ALL)}")
    return frozenset(Kind(name) for name in names)


def list_kinds(kinds: Collection[Kind]) -> str:
    """Kinds in their order, for messages."""
    return ", ".join(kind.value for kind in Kind if kind in kinds) or "nothing"
