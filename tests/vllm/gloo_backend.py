"""vLLM's dense backend over gloo in place of NCCL: its own trainer and worker engines, of which
only the lines that name a GPU are other ones. Imported by both sides; needs vLLM.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

TIMEOUT_S = 60.0


class Gloo:
    """What these engines use of a `PyNcclCommunicator`."""

    def __init__(self, info: Any, rank: int) -> None:
        limit = timedelta(seconds=TIMEOUT_S)
        self._store = dist.TCPStore(
            info.master_address, info.master_port, info.world_size, rank == 0, limit, False
        )
        self._group = dist.ProcessGroupGloo(self._store, rank, info.world_size, limit)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._group.broadcast(tensor.reshape(-1).view(torch.uint8), src).wait()


class GlooInit(NCCLTrainerInitInfo):
    """Its own, for a name of its own."""

    backend: ClassVar[str] = "gloo"


class GlooTrainerEngine(NCCLTrainerWeightTransferEngine):
    """vLLM's `send_weights`, with its checks of names, dtypes and shapes."""

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        import threading

        engine = cls(client=client, source=source, is_sender=init_info.is_sender, packed=False)
        if engine.is_sender:
            info = {
                "master_address": init_info.master_address,
                "master_port": init_info.master_port,
                "rank_offset": 1,
                "world_size": init_info.world_size,
            }
            call = threading.Thread(target=client.init_weight_transfer_engine, args=(info,))
            call.start()
            engine.model_update_group = Gloo(init_info, 0)
            call.join()
        return engine

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


def register() -> None:
    WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
