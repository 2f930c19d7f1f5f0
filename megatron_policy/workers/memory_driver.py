"""The driver's part in memory states: asks all workers; knows no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_policy.workers.group import WorkerGroup


class DriverMemory:
    """Brings onto the workers' devices what comes next needs; see `WorkerMemory`."""

    _workers: WorkerGroup

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Everything on the devices: parameters, gradient buffers, optimizer state."""
        self._workers.run_all("prepare_for_training")

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Only parameters on the devices; with `keep_train_buffers` what is there of training stays
        too.
        """
        self._workers.run_all("prepare_for_lp_inference", keep_train_buffers=keep_train_buffers)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Give back gradient buffers and optimizer state; parameters stay for reading."""
        self._workers.run_all("finish_training")

    def finish_inference(self) -> None:
        """Parameters leave the devices; what there is of training stays where it is."""
        self._workers.run_all("finish_inference")

    def offload_before_refit(self) -> None:
        """Only parameters on the devices: room for what travels to the engines."""
        self._workers.run_all("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Nothing on the devices: the engines have them to themselves."""
        self._workers.run_all("offload_after_refit")

    def offload_to_cpu(self) -> None:
        """As `offload_after_refit`."""
        self.offload_after_refit()

    def get_free_memory_bytes(self) -> int:
        """The fewest free bytes that any worker's device has."""
        free: list[int] = self._workers.run_all("get_free_memory_bytes")
        return min(free)
