"""The driver's names of what the parts of a rank's policy do."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.states import IDLE, LOGPROB, REFIT, TRAIN, Kind, MemoryState


def _of_part(path: str, *first: Any) -> Callable[..., Any]:
    """A method of a policy that calls what is at `path` below it, with `first` as arguments before
    the caller's.
    """
    reach = attrgetter(path)

    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        return reach(self)(*first, *args, **kwargs)

    call.__doc__ = f"The driver's name of `{path}({', '.join(map(str, first))})`."
    return call


def _enters(state: MemoryState) -> Callable[..., None]:
    """A method of a policy that has its memory go to `state`, regardless of what a host passes."""

    def enter(self: DriverNames, *args: Any, **kwargs: Any) -> None:
        self.memory.enter(state)

    enter.__doc__ = f"The driver's name of `memory.enter({state.name.upper()})`."
    return enter


class DriverNames:
    """Names under which hosts and the driver call a rank's policy, beside its own."""

    memory: DeviceMemory

    begin_train_step = _of_part("accumulator.begin")
    train_microbatch = _of_part("accumulator.microbatch")
    finish_train_step = _of_part("accumulator.finish")
    abort_train_step = _of_part("accumulator.abort")
    prepare_for_training = _enters(TRAIN)
    finish_training = _enters(LOGPROB)
    offload_before_refit = _enters(REFIT)
    offload_after_refit = _enters(IDLE)
    prepare_for_generation = _of_part("memory.onload", Kind.PARAMETERS)
    finish_inference = _of_part("memory.offload", Kind.PARAMETERS)

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Only parameters on the device; with `keep_train_buffers` training state on the device
        stays, gradients included.
        """
        if keep_train_buffers:
            self.memory.onload(Kind.PARAMETERS)
        else:
            self.memory.enter(LOGPROB)
