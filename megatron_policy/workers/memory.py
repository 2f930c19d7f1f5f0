"""One rank's memory states under the host's names; knows no other rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_policy import device
from megatron_policy.memory.states import IDLE, LOGPROB, REFIT, TRAIN, Kind

if TYPE_CHECKING:
    import torch

    from megatron_policy.policy import MegatronPolicy


class WorkerMemory:
    """Brings onto the device what comes next needs, and puts the rest into host memory.

    Every method may be called in every state, and twice. What a state does not permit is refused by
    the method that needs more, with the name of the state and of the call that mends it.
    """

    policy: MegatronPolicy
    _release_handles: Callable[[], None]
    """Gives back what a refit has left on the device; see `WorkerRefit`."""

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Everything on the device: parameters, gradient buffers, optimizer state."""
        self.policy.memory.enter(TRAIN)

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Only parameters on the device; with `keep_train_buffers` whatever of training is there
        stays, gradients included.
        """
        if keep_train_buffers:
            self.policy.memory.onload(Kind.PARAMETERS)
        else:
            self.policy.memory.enter(LOGPROB)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Give back gradient buffers and optimizer state; parameters stay for reading."""
        self.policy.memory.enter(LOGPROB)

    def finish_inference(self) -> None:
        """Parameters leave the device; what there is of training stays where it is."""
        self.policy.memory.offload(Kind.PARAMETERS)

    def prepare_for_generation(self) -> None:
        """Parameters on the device, for a policy that generates itself."""
        self.policy.memory.onload(Kind.PARAMETERS)

    def offload_before_refit(self) -> None:
        """Only parameters on the device: room for what travels to the engine."""
        self.policy.memory.enter(REFIT)

    def offload_after_refit(self) -> None:
        """Nothing on the device: the engine has it to itself."""
        self.policy.memory.enter(IDLE)
        self._release_handles()

    def get_free_memory_bytes(self) -> int:
        """Free bytes of this rank's device, or of the host's memory on CPU."""
        return device.memory_info().free

    def move_to_cpu(self, model: torch.nn.Module) -> torch.nn.Module:
        """`model` with its parameters and buffers in host memory."""
        from megatron_policy.memory.move_model import move_to_host

        return move_to_host(self.policy.memory, model)

    def move_to_cuda(self, model: torch.nn.Module) -> torch.nn.Module:
        """`model` with its parameters and buffers on the device this rank computes on."""
        from megatron_policy.memory.move_model import move_to_own_device

        return move_to_own_device(self.policy.memory, model)

    def move_to_device(self, model: torch.nn.Module, device: Any) -> torch.nn.Module:
        """`model` with its parameters and buffers on `device`."""
        from megatron_policy.memory.move_model import move_to_device

        return move_to_device(self.policy.memory, model, device)

    def move_buffer_to_device(self, model: torch.nn.Module, device: Any) -> torch.nn.Module:
        """`model` with its buffers on `device`."""
        from megatron_policy.memory.move_model import move_buffers

        return move_buffers(self.policy.memory, model, device)
