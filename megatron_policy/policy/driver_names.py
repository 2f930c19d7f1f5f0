"""The driver's names of what the parts of a rank's policy do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar

from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.states import IDLE, LOGPROB, REFIT, TRAIN, Kind
from megatron_policy.training.accumulate import GradientAccumulator

Result = TypeVar("Result")


def delegate(path: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """A method that calls `function` with what is at `path` below its object as the first argument:
    a method of that, or a plain function. It has the signature and the docstring of `function`.
    It calls `function` itself: a subclass's override of that has to be delegated again.
    """
    reach = attrgetter(path)

    @wraps(function)
    def call(self: object, /, *args: Any, **kwargs: Any) -> Result:
        return function(reach(self), *args, **kwargs)

    # Ray changes the signature of what an actor's method wraps: `function` is to keep its own.
    del call.__wrapped__
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


class DriverNames:
    """Names under which hosts and the driver call a rank's policy, beside its own."""

    memory: DeviceMemory

    begin_train_step = delegate("accumulator", GradientAccumulator.begin)
    train_microbatch = delegate("accumulator", GradientAccumulator.microbatch)
    finish_train_step = delegate("accumulator", GradientAccumulator.finish)
    abort_train_step = delegate("accumulator", GradientAccumulator.abort)

    # Hosts pass arguments of their own to these four.
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """The driver's name of `memory.enter(TRAIN)`."""
        self.memory.enter(TRAIN)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """The driver's name of `memory.enter(LOGPROB)`."""
        self.memory.enter(LOGPROB)

    def offload_before_refit(self, *args: Any, **kwargs: Any) -> None:
        """The driver's name of `memory.enter(REFIT)`."""
        self.memory.enter(REFIT)

    def offload_after_refit(self, *args: Any, **kwargs: Any) -> None:
        """The driver's name of `memory.enter(IDLE)`."""
        self.memory.enter(IDLE)

    def prepare_for_generation(self) -> None:
        """Parameters on the device, for a policy that itself generates."""
        self.memory.onload(Kind.PARAMETERS)

    def finish_inference(self) -> None:
        """Parameters leave the device; training state stays where it is."""
        self.memory.offload(Kind.PARAMETERS)

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Only parameters on the device; with `keep_train_buffers` training state on the device
        stays, gradients included.
        """
        if keep_train_buffers:
            self.memory.onload(Kind.PARAMETERS)
        else:
            self.memory.enter(LOGPROB)
