"""vLLM's dense and sparse backends over gloo in place of NCCL: its own trainer and worker engines,
of which only the lines that name a GPU are other ones. Imported by both sides; needs vLLM.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from vllm import _custom_ops
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)
from vllm.distributed.weight_transfer.sparse_nccl_engine import (
    SparseNCCLTrainerWeightTransferEngine,
    SparseNCCLWeightTransferEngine,
)

TIMEOUT_S = 60.0
UNPACKED = "WITHOUT_PACKED_WEIGHTS"
"""The environment variable with which weights stay as on a GPU: those that oneDNN has packed cannot
be patched.
"""


class Gloo:
    """What these engines use of a `PyNcclCommunicator`."""

    device = torch.device("cpu")

    def __init__(self, info: Any, rank: int) -> None:
        limit = timedelta(seconds=TIMEOUT_S)
        self._store = dist.TCPStore(
            info.master_address, info.master_port, info.world_size, rank == 0, limit, False
        )
        self._group = dist.ProcessGroupGloo(self._store, rank, info.world_size, limit)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: None = None) -> None:
        self._group.broadcast(tensor.reshape(-1).view(torch.uint8), src).wait()


class GlooInit(NCCLTrainerInitInfo):
    """Its own, for a name of its own."""

    backend: ClassVar[str] = "gloo"


def join(engine: Any, init_info: Any) -> Any:
    """The trainer's engine, in one group with the workers if it sends."""
    if engine.is_sender:
        info = {
            "master_address": init_info.master_address,
            "master_port": init_info.master_port,
            "rank_offset": 1,
            "world_size": init_info.world_size,
        }
        call = threading.Thread(target=engine.client.init_weight_transfer_engine, args=(info,))
        call.start()
        engine.model_update_group = Gloo(init_info, 0)
        call.join()
    return engine


def without_gpu() -> AbstractContextManager[Any]:
    """In this context torch has a stream and a device for who asks, which do nothing."""
    context = ExitStack()
    for module, name, found in (
        (torch.cuda, "current_stream", None),
        (torch.accelerator, "device_index", nullcontext()),
    ):
        context.enter_context(mock.patch.object(module, name, return_value=found))
    return context


class GlooTrainerEngine(NCCLTrainerWeightTransferEngine):
    """vLLM's `send_weights`, with its checks of names, dtypes and shapes."""

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, packed=False)
        return join(engine, init_info)

    def _broadcast(self, source: Any, meta: Any) -> None:
        if not self.is_sender:
            return super()._broadcast(source, meta)
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor, 0)
        return None


class GlooEngine(NCCLWeightTransferEngine):
    """vLLM's lifecycle: its layerwise reload from the start to the end of an update."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self.model_update_group = Gloo(init_info, init_info.rank_offset + self.parallel_config.rank)

    def update_weights(self, update_info: Any) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        for name, dtype, shape in zip(
            update_info.names, update_info.dtype_names, update_info.shapes, strict=True
        ):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.model_update_group.broadcast(weight, 0)
            self.model.load_weights([(name, weight)])


class SparseGlooTrainerEngine(SparseNCCLTrainerWeightTransferEngine):
    """vLLM's chunks of patches, with its checks of their form."""

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        return join(cls(client=client, is_sender=init_info.is_sender), init_info)

    def _broadcast_chunk(self, patches: Any) -> None:
        with without_gpu():
            super()._broadcast_chunk(patches)


class SparseGlooEngine(SparseNCCLWeightTransferEngine):
    """vLLM's patches of a model in place, through its own loader."""

    init_transfer_engine = GlooEngine.init_transfer_engine
    update_weights = GlooEngine.update_weights

    def receive_weights(self, update_info: Any) -> None:
        with without_gpu():
            super().receive_weights(update_info)


def register() -> None:
    if UNPACKED in os.environ:
        _custom_ops._supports_onednn = False
    WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
    WeightTransferEngineFactory.register_engine("sparse_gloo", SparseGlooEngine)
