"""Methods for vLLM's workers, with which they receive weights.

    vllm serve MODEL --worker-extension-cls vllm_extension.RefitExtension

or `LLM(MODEL, worker_extension_cls=...)`, with this folder on PYTHONPATH. vLLM makes its worker
class inherit from the named one, and `collective_rpc(METHOD, args=...)` calls a method of every
worker. This file imports nothing from vLLM. It has been run with a stand-in for a worker; inside
vLLM 0.31.0 it fails, as docs/known-issues.md says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_policy import device
from megatron_policy.refit.receive.collective import CollectiveGroup, join_collective
from megatron_policy.refit.receive.receiver import Receiver

PlainInfo = dict[str, tuple[list[int], str]]


def plain(info: Mapping[str, Sequence[Any]]) -> PlainInfo:
    """The trainer's `prepare_refit_info` in a form that vLLM can send to its workers: its messages
    cannot hold dtypes.
    """
    return {
        name: (list(shape), str(dtype).removeprefix("torch."))
        for name, (shape, dtype, *_) in info.items()
    }


class RefitExtension:
    """Mixed into vLLM's worker; all names begin with `refit` to avoid the worker's own."""

    model_runner: Any  # vLLM's

    def refit_prepare(
        self, info: PlainInfo, timeout_s: float = 120.0, staged: bool = False
    ) -> None:
        """Prepare for what will be sent, `plain(prepare_refit_info())`, once before the first
        refit.

        `staged` keeps all weights aside until they are checked, so that a failed refit leaves
        the engine unchanged; that takes memory for the whole model, unsharded, on every worker.
        """
        model = self.model_runner.model
        self.refit_receiver = Receiver(
            lambda weights: model.load_weights(weights=weights),
            expected={
                name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in info.items()
            },
            timeout_s=timeout_s,
            staged=staged,
        )

    def refit_from_stream(self, addresses: Mapping[str, str]) -> int:
        """One refit from the training rank on this worker's GPU; returns its step.

        `addresses` come from the driver's `get_refit_addresses`, by device. Start it before the
        trainer's `stream_weights_via_ipc_zmq`, or at the same time.
        """
        address = addresses[device.device_id()]
        return self._refit_done(self.refit_receiver.receive_ipc_stream(address).step)

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
        """One refit over the group; returns the trainer's step."""
        return self._refit_done(self.refit_receiver.receive_collective(self.refit_group).step)

    def refit_state(self) -> tuple[int | None, bool]:
        """The step of the weights, and whether they are mixed: after a refit without `staged` has
        failed, do not generate before the next one.
        """
        return self.refit_receiver.step, self.refit_receiver.mixed

    def _refit_done(self, step: int) -> int:
        device.synchronize()
        return step
