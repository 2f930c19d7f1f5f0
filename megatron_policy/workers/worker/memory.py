"""One rank's memory states, under the host's method names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_policy import device

if TYPE_CHECKING:
    import torch

    from megatron_policy.policy import MegatronPolicy


class WorkerMemory:
    """Moves to the device what the next phase needs, and the rest to host memory.

    Every method can be called in every state, and twice. A method that needs more than the state
    has on the device refuses, and names the state and the call that fixes it.
    """

    policy: MegatronPolicy
    _release_handles: Callable[[], None]
    """Frees what a refit has left on the device; see `WorkerRefit`."""

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Everything on the device: parameters, gradient buffers, optimizer state."""
        self.policy.prepare_for_training()

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Only parameters on the device; with `keep_train_buffers` training state on the device
        stays, gradients included.
        """
        self.policy.prepare_for_lp_inference(keep_train_buffers)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Free gradient buffers and optimizer state; parameters stay for inference."""
        self.policy.finish_training()

    def finish_inference(self) -> None:
        """Parameters leave the device; training state stays where it is."""
        self.policy.finish_inference()

    def prepare_for_generation(self) -> None:
        """Parameters on the device, for a policy that itself generates."""
        self.policy.prepare_for_generation()

    def offload_before_refit(self) -> None:
        """Only parameters on the device: memory for transfers to the engine."""
        self.policy.offload_before_refit()

    def offload_after_refit(self) -> None:
        """Nothing on the device: it is free for the engine."""
        self.policy.offload_after_refit()
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

    # As on the host's FSDP1 worker. Not methods of their own: Ray pickles each by value.
    manual_offload_to_cpu, manual_load_to_gpu = move_to_cpu, move_to_cuda

    def move_to_device(self, model: torch.nn.Module, device: Any) -> torch.nn.Module:
        """`model` with its parameters and buffers on `device`."""
        from megatron_policy.memory.move_model import move_to_device

        return move_to_device(self.policy.memory, model, device)

    def move_buffer_to_device(self, model: torch.nn.Module, device: Any) -> torch.nn.Module:
        """`model` with its buffers on `device`."""
        from megatron_policy.memory.move_model import move_buffers

        return move_buffers(self.policy.memory, model, device)
