"""How a class offers what its parts do, and the driver's names of what memory does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.states import IDLE, LOGPROB, REFIT, TRAIN, Kind

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def delegate(
    path: str, function: Callable[Concatenate[Any, Arguments], Result]
) -> Callable[Concatenate[Any, Arguments], Result]:
    """A method that calls `function` with what is at `path` below its object as the first argument:
    a method of that, or a plain function. It has the signature and the docstring of `function`.
    It calls `function` itself: a subclass's override of that has to be delegated again.
    """
    reach = attrgetter(path)

    @wraps(function)
    def call(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return function(reach(self), *args, **kwargs)

    # Ray changes the signature of what an actor's method wraps: `function` is to keep its own.
    del call.__wrapped__
    signature = inspect.signature(function)
    first, *others = signature.parameters.values()
    own = first.replace(name="self", annotation=inspect.Parameter.empty)
    call.__signature__ = signature.replace(parameters=[own, *others])  # type: ignore[attr-defined]
    return call


# Hosts pass arguments of their own to these four.
def prepare_for_training(memory: DeviceMemory, *args: Any, **kwargs: Any) -> None:
    """The driver's name of `memory.enter(TRAIN)`."""
    memory.enter(TRAIN)


def finish_training(memory: DeviceMemory, *args: Any, **kwargs: Any) -> None:
    """The driver's name of `memory.enter(LOGPROB)`."""
    memory.enter(LOGPROB)


def offload_before_refit(memory: DeviceMemory, *args: Any, **kwargs: Any) -> None:
    """The driver's name of `memory.enter(REFIT)`."""
    memory.enter(REFIT)


def offload_after_refit(memory: DeviceMemory, *args: Any, **kwargs: Any) -> None:
    """The driver's name of `memory.enter(IDLE)`."""
    memory.enter(IDLE)


def prepare_for_generation(memory: DeviceMemory) -> None:
    """Parameters on the device, for a policy that itself generates."""
    memory.onload(Kind.PARAMETERS)


def finish_inference(memory: DeviceMemory) -> None:
    """Parameters leave the device; training state stays where it is."""
    memory.offload(Kind.PARAMETERS)


def prepare_for_lp_inference(memory: DeviceMemory, keep_train_buffers: bool = False) -> None:
    """Only parameters on the device; with `keep_train_buffers` training state on the device stays,
    gradients included.
    """
    if keep_train_buffers:
        memory.onload(Kind.PARAMETERS)
    else:
        memory.enter(LOGPROB)
