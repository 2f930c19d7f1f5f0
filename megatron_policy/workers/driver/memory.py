"""The driver's part in memory states: calls all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_policy.workers.cluster.group import WorkerGroup


class DriverMemory:
    """Moves to the workers' devices what the next phase needs; see `WorkerMemory`."""

    _workers: WorkerGroup

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Everything on the devices: parameters, gradient buffers, optimizer state."""
        self._workers.run_all("prepare_for_training")

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Only parameters on the devices; with `keep_train_buffers` training state on them stays
        too.
        """
        self._workers.run_all("prepare_for_lp_inference", keep_train_buffers=keep_train_buffers)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Free gradient buffers and optimizer state; parameters stay for inference."""
        self._workers.run_all("finish_training")

    def finish_inference(self) -> None:
        """Parameters leave the devices; training state stays where it is."""
        self._workers.run_all("finish_inference")

    def offload_before_refit(self) -> None:
        """Only parameters on the devices: memory for transfers to the engines."""
        self._workers.run_all("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Nothing on the devices: all of them are free for the engines."""
        self._workers.run_all("offload_after_refit")

    def offload_to_cpu(self) -> None:
        """Same as `offload_after_refit`."""
        self.offload_after_refit()

    def get_free_memory_bytes(self) -> int:
        """The smallest number of free bytes on any worker's device."""
        free: list[int] = self._workers.run_all("get_free_memory_bytes")
        return min(free)
