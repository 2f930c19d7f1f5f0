"""How a class offers what its parts do, and the driver's names of what memory does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.states import IDLE, LOGPROB, REFIT, TRAIN, Kind, MemoryState

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def delegate(
    path: str, function: Callable[Concatenate[Any, Arguments], Result]
) -> Callable[Concatenate[Any, Arguments], Result]:
    """A method that calls `function` with what is at `path` below its object as the first argument:
    a method of that, or a plain function. It has the signature and the docstring of `function`.
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


def _enter(state: MemoryState) -> Callable[..., None]:
    """A function that has memory go to `state`, regardless of what else a host passes."""

    def enter(memory: DeviceMemory, *args: Any, **kwargs: Any) -> None:
        memory.enter(state)

    enter.__doc__ = f"The driver's name of `memory.enter({state.name.upper()})`."
    return enter


prepare_for_training, finish_training = _enter(TRAIN), _enter(LOGPROB)
offload_before_refit, offload_after_refit = _enter(REFIT), _enter(IDLE)


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
