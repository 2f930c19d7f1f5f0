"""For vLLM: methods that its workers get, with which they receive weights. It knows no trainer.

    vllm serve MODEL --worker-extension-cls vllm_extension.RefitExtension

or `LLM(MODEL, worker_extension_cls=...)`, with this folder on PYTHONPATH. vLLM makes its worker
class inherit from the named one, and `collective_rpc(METHOD, args=...)` calls a method of every
worker. This file imports nothing of vLLM. It has been run with a stand-in for a worker, and not
yet inside vLLM.
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
    """What the trainer's `prepare_refit_info` returned, as vLLM can carry it to its workers: its
    messages hold no dtypes.
    """
    return {
        name: (list(shape), str(dtype).removeprefix("torch."))
        for name, (shape, dtype, *_) in info.items()
    }


class RefitExtension:
    """Added to vLLM's worker, whose own names it avoids: all of these begin with `refit`."""

    model_runner: Any  # vLLM's

    def refit_prepare(
        self, info: PlainInfo, timeout_s: float = 120.0, staged: bool = False
    ) -> None:
        """Once, before the first refit: what will be sent, `plain(prepare_refit_info())`.

        `staged` keeps all weights aside until they are checked, so that a refit that fails leaves
        the engine as it was; that takes memory for the whole model, unsharded, on every worker.
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

        `addresses` are those of the driver's `get_refit_addresses`, by device. Begin it before the
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
        """Join a group with the trainer, as its `init_collective` was told; `rank` is that of the
        first worker, the others follow. `secret` is the driver's `get_refit_secret()`.
        """
        own = rank + torch.distributed.get_rank()
        self.refit_group: CollectiveGroup = join_collective(
            ip, port, own, world_size, train_world_size, secret=secret
        )

    def refit_from_group(self) -> int:
        """One refit over the group; returns the trainer's step."""
        return self._refit_done(self.refit_receiver.receive_collective(self.refit_group).step)

    def refit_state(self) -> tuple[int | None, bool]:
        """The step of the weights, and whether they are mixed: after a refit that was not staged
        has failed, do not generate before the next one.
        """
        return self.refit_receiver.step, self.refit_receiver.mixed

    def _refit_done(self, step: int) -> int:
        device.synchronize()
        return step
