"""vLLM's side of `transfer.py`: an engine for its weight transfer, that checks what arrives before
vLLM computes with it. Named as the backend `megatron_policy` of `WeightTransferConfig`; vLLM's
factory imports this file in each of its workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron_policy import device
from megatron_policy.dtypes import dtype_named
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.inference.vllm.reload import ModelReload
from megatron_policy.refit.manifest import RefitInfo, RefitManifest, ServedModel
from megatron_policy.refit.receive.assembler import WeightAssembler
from megatron_policy.refit.receive.ipc import carry_out
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.ipc.protocol import parse_request


@dataclass
class TransferInit(WeightTransferInitInfo):
    """See `WeightTransfer.init_info`. Without `tensors`, whole models that vLLM can load."""

    tensors: dict[str, list[Any]] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    staged: bool = True

    def expected(self) -> RefitInfo | None:
        """The tensors, as a receiver expects them; ValueError if they cannot be read."""
        if self.tensors is None:
            return None
        forms = {n: (tuple(shape), dtype_named(d)) for n, (d, shape) in self.tensors.items()}
        return RefitInfo(forms, ServedModel.from_plain(self.model))


@dataclass
class TransferRequest(WeightTransferUpdateInfo):
    """A request of the stream, or why none follows."""

    request: str = ""
    gave_up: str = ""


class PolicyTransferEngine(WeightTransferEngine[TransferInit, TransferRequest]):
    """Receives updates in one of vLLM's workers. An update that is refused raises RefitError in
    `update_weights`, which the trainer then raises too.

    The parts of an update are requests of `refit/transports/ipc/protocol.py`. The last has the
    manifest: what has arrived is compared with it and, if all is well, loaded, all before
    `finish_weight_update`.
    """

    init_info_cls = TransferInit
    update_info_cls = TransferRequest
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        if vllm_config.parallel_config.world_size > 1:
            raise ConfigError(
                "this backend serves a vLLM with one worker: of several that refuse an update, "
                "vLLM reads one answer, and takes the others for answers to its next call. Use "
                "the worker extension (VllmEngine) in its place"
            )
        self._reload: ModelReload | None = None
        self._assembler: WeightAssembler | None = None
        self._accepted: RefitManifest | None = None
        self.init_transfer_engine(TransferInit())

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Begin to follow a trainer, which may also have gone back to an earlier step."""
        self._end()  # the update of a trainer that has left
        self._reload = reload = ModelReload(
            self.model, self.vllm_config, keeps_tensors=init_info.staged
        )
        self._receiver = Receiver(
            reload.load,
            begin=reload.begin,
            finish=reload.finish,
            expected=init_info.expected(),
            staged=init_info.staged,
        )

    def start_weight_update(self) -> None:
        """Begin an update. The model stays as it is until weights are loaded."""
        self._assembler, self._accepted = self._receiver.assembler(), None

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """One request. The base class then waits for an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(dict(update_info)))

    def receive_weights(self, update_info: TransferRequest) -> None:
        """Carry out one request; RefitError if the update is refused, which ends it."""
        assembler = self._assembler
        if assembler is None or update_info.gave_up:
            self._end()
            raise RefitError(f"the trainer gave up: {update_info.gave_up or 'nothing was begun'}")
        try:
            accepted = carry_out(parse_request(update_info.request.encode()), assembler)
        except BaseException:
            self._end()
            raise
        if accepted is not None:
            self._end()
            self._accepted = accepted

    def finish_weight_update(self) -> None:
        """The weights were loaded when the manifest came; RefitError if none has."""
        if self._accepted is None:
            raise RefitError("the update is not complete: its manifest has not come")

    def shutdown(self) -> None:
        """Drop what is kept between updates."""
        self._receiver.release()

    def _end(self) -> None:
        self._assembler = None
        if self._reload is not None:
            self._reload.close()
        device.synchronize()
