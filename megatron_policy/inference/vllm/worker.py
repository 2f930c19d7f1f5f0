"""Methods for vLLM's workers, with which they receive weights.

    vllm serve MODEL --worker-extension-cls megatron_policy.inference.vllm.worker.RefitExtension

or `LLM(MODEL, worker_extension_cls=...)`. vLLM makes its worker class inherit from the named one,
and `collective_rpc(METHOD, args=...)` calls a method of every worker. Run with vLLM 0.31.0 on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_policy import device
from megatron_policy.errors import ConfigError
from megatron_policy.inference.vllm.reload import ModelReload
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.receive.collective import CollectiveGroup, join_collective
from megatron_policy.refit.receive.receiver import Receiver

PlainInfo = dict[str, tuple[list[int], str]]


def make_plain(info: Mapping[str, Sequence[Any]]) -> PlainInfo:
    """The trainer's `prepare_refit_info` in a form that vLLM can send to its workers: its messages
    cannot hold dtypes.
    """
    return {
        name: (list(shape), str(dtype).removeprefix("torch."))
        for name, (shape, dtype, *_) in info.items()
    }


class RefitExtension:
    """Mixed into vLLM's worker; all names begin with `refit` to avoid the worker's own.

    All methods that receive return the trainer's step, and raise RefitError, as the trainer does,
    if the refit is refused. Without a complete refit `refit_state` tells what the engine holds.
    """

    model_runner: Any  # vLLM's
    vllm_config: Any

    def refit_prepare(
        self, info: PlainInfo, timeout_s: float = 120.0, staged: bool = False
    ) -> None:
        """Prepare for what will be sent, `make_plain(prepare_refit_info())`, once before the first
        refit.

        `staged` keeps all weights aside until they are checked, so that a refused refit leaves
        the engine unchanged; that takes memory for the whole model, unsharded, on every worker.
        """
        self.refit_model = ModelReload(
            self.model_runner.get_model(), self.vllm_config, keeps_tensors=staged
        )
        self.refit_receiver = Receiver(
            self.refit_model.load,
            finish=self.refit_model.finish,
            expected={
                name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in info.items()
            },
            timeout_s=timeout_s,
            staged=staged,
        )

    def refit_from_stream(self, addresses: str | Sequence[str] | Mapping[str, str]) -> int:
        """One refit from a training rank on this machine.

        `addresses` are the driver's `get_refit_addresses`, by GPU; or a list with one for each of
        vLLM's workers; or the only worker's. Start it before the trainer's
        `stream_weights_via_ipc_zmq`, or at the same time.
        """
        address = _choose_address(addresses, torch.distributed.get_rank())
        return self._refit_by(lambda: self.refit_receiver.receive_ipc_stream(address))

    def refit_join(
        self,
        rank: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int | None = None,
        secret: str | None = None,
    ) -> None:
        """Join a group with the trainer, with the arguments of its `init_collective`.

        `rank` is that of the first worker, the others follow. `secret` is the driver's
        `get_refit_secret()`.
        """
        own = rank + torch.distributed.get_rank()
        self.refit_group: CollectiveGroup = join_collective(
            ip, port, own, world_size, train_world_size, secret=secret
        )

    def refit_from_group(self) -> int:
        """One refit over the group."""
        return self._refit_by(lambda: self.refit_receiver.receive_collective(self.refit_group))

    def refit_from_directory(self, path: str) -> int:
        """One refit from a directory that the trainer has published."""
        return self._refit_by(lambda: self.refit_receiver.receive_directory(path))

    def refit_state(self) -> tuple[int | None, bool]:
        """The step of the weights, and whether they are mixed: after a refit without `staged` has
        failed, do not generate before the next one.
        """
        return self.refit_receiver.step, self.refit_receiver.mixed

    def refit_mark_mixed(self) -> None:
        """Say that the weights are not to be used until the next complete refit: a probe has found
        that the engine computes with others.
        """
        self.refit_receiver.mark_mixed()

    def _refit_by(self, receive: Callable[[], RefitManifest]) -> int:
        try:
            manifest = receive()
        finally:
            self.refit_model.close()
            device.synchronize()
        # Adapters that were merged or cached belong to the weights before.
        self.model_runner.reset_lora_state()
        return manifest.step


def _choose_address(addresses: str | Sequence[str] | Mapping[str, str], rank: int) -> str:
    """The address for vLLM's worker `rank`."""
    if isinstance(addresses, str):
        addresses = [addresses]
    if isinstance(addresses, Mapping):
        if (own := device.device_id()) in addresses:
            return addresses[own]
        raise ConfigError(
            f"no training rank sends to the device {own} of vLLM's worker {rank}: they send to "
            f"{', '.join(addresses)}. Where no GPU is shared, give a list of addresses, one for "
            "each of vLLM's workers, and the same to the trainer: IpcStream({rank: address})"
        )
    if rank >= len(addresses):
        raise ConfigError(
            f"vLLM's worker {rank} has no address: {len(addresses)} are given, and each needs one"
        )
    return addresses[rank]
