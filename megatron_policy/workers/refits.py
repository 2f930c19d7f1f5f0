"""One rank's part in refits of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_policy import device
from megatron_policy.errors import RefitError
from megatron_policy.memory.states import SEND_WEIGHTS
from megatron_policy.refit.manifest import RefitInfo
from megatron_policy.workers.checks import refuse_scales, refuse_unknown

if TYPE_CHECKING:
    from megatron_policy.config import PolicyConfig
    from megatron_policy.policy import MegatronPolicy
    from megatron_policy.refit.transports.collective.transport import Collective
    from megatron_policy.refit.transports.ipc.handles import IpcHandles

_SHARE_OF_FREE_MEMORY = 0.2


class EngineRefits:
    """Sends one rank's weights to engines: by shared memory in both of the host's protocols, or
    over a group that they joined. Every method is collective.
    """

    def __init__(self, policy: MegatronPolicy) -> None:
        self.policy = policy
        self._collective: Collective | None = None
        self._handles: IpcHandles | None = None

    def prepare_refit_info(
        self, with_numel: bool = False, adapters: bool = False, as_stored: bool = False
    ) -> RefitInfo:
        """{HF name: (shape, dtype)} of what will be sent, in that order, on every rank, and its
        `model`: what engines have to set up for it. With `as_stored`, of directories, which have
        the checkpoint's dtypes.

        `with_numel` gives (shape, dtype, elements), as hosts before 0.4 expect.
        """
        exporter = self.policy.exporter.select(adapters=adapters)
        forms = {
            t.name: (t.shape, t.dtype, *([t.nbytes // t.dtype.itemsize] if with_numel else []))
            for t in exporter.plan(as_stored=as_stored).tensors
        }
        return RefitInfo(forms, exporter.served_model)

    def prepare_info_for_collective(self, adapters: bool = False) -> RefitInfo:
        """As `prepare_refit_info`, of what `broadcast_weights_for_collective` sends."""
        return self.prepare_refit_info(adapters=adapters)

    def get_refit_address(self) -> str:
        """The ZeroMQ address that `stream_weights_via_ipc_zmq` binds on this rank."""
        from megatron_policy.refit.transports.ipc.transport import address_of

        return address_of(device.device_id())

    def stream_weights_via_ipc_zmq(
        self,
        buffer_size_bytes: int | None = None,
        kv_scales: Any = None,
        adapters: bool = False,
    ) -> dict[str, float] | None:
        """Send all weights, or the `adapters` alone, to the engine on this rank's device, in two
        buffers of half of `buffer_size_bytes` each; returns when it has accepted them, with
        `RefitManifest.speed`. The engine is a `Receiver`.

        RefitError on every rank if any rank's engine refuses or does not reply in time.
        """
        from megatron_policy.refit.transports.ipc.transport import IpcStream

        refuse_scales(kv_scales)
        size = buffer_size_bytes or _configured_bytes(self.policy.config)
        # Every rank listens at its own address, and asks for no other.
        ranks = range(self.policy.topology.world_size)
        addresses = dict.fromkeys(ranks, self.get_refit_address())
        return self.policy.refit(IpcStream(addresses, _whole(size)), adapters=adapters).speed

    def prepare_weights_for_ipc(
        self, adapters: bool = False
    ) -> tuple[list[tuple[str, int]], float]:
        """[(HF name, bytes)] in order, for the caller to group, and the most bytes of a group."""
        tensors = self.policy.exporter.select(adapters=adapters).plan().tensors
        free = device.shareable_bytes() * _SHARE_OF_FREE_MEMORY
        return [(t.name, t.nbytes) for t in tensors], float(
            _configured_bytes(self.policy.config) or free
        )

    def get_weights_ipc_handles(self, keys: list[str], adapters: bool = False) -> dict[str, Any]:
        """{device id: (True, [(dtype, handle)], {HF name: offset in elements})} of these tensors,
        which are of `adapters` alone or of the model, packed by dtype. Valid until the next call or
        `offload_after_refit`.
        """
        from megatron_policy.refit.transports.ipc.handles import IpcHandles

        self.policy.memory.ready("get_weights_ipc_handles()", SEND_WEIGHTS)
        self.policy.finish_refit()
        if self._handles is None:
            self._handles = IpcHandles(self.policy.exporter)
        return self._handles.weights(tuple(keys), self.policy.steps, adapters=adapters)

    def get_refit_manifest(self) -> dict[str, Any]:
        """{device id: Manifest} of what `get_weights_ipc_handles` has exported since the last
        call; an engine completes its refit with it (`Receiver.finish_ipc`).
        """
        if self._handles is None:
            raise RefitError("nothing was exported: call get_weights_ipc_handles first")
        return {device.device_id(): self._handles.manifest(self.policy.steps)}

    def init_collective(
        self,
        /,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int | None = None,
        secret: str | None = None,
        **options: Any,
    ) -> None:
        """Meet the engines' ranks at `ip`:`port`, where rank 0 listens. They need `secret`; by
        default rank 0 makes it: see `get_refit_secret`.

        Without `train_world_size` only rank 0 joins, and `world_size` is 1 + the engines' ranks;
        with it `world_size` counts all ranks of both sides, the engines' after ours.
        """
        from megatron_policy.refit.transports.collective.transport import Collective

        refuse_unknown("init_collective", options)
        self.policy.finish_refit()
        self._leave()
        self._collective = Collective.join(
            self.policy.exporter, ip, port, world_size, train_world_size, secret=secret
        )

    def get_refit_secret(self) -> str:
        """What an engine needs to join the group of `init_collective`."""
        if self._collective is None:
            raise RefitError("there is no group to join: call init_collective first")
        return self._collective.secret

    def broadcast_weights_for_collective(
        self,
        kv_scales: Any = None,
        buffer_size_bytes: int | None = None,
        num_buffers: int | None = None,
        adapters: bool = False,
    ) -> dict[str, float] | None:
        """Send all weights, or the `adapters` alone, to the engines that joined, at most
        `buffer_size_bytes` per broadcast; returns when all have accepted, with
        `RefitManifest.speed`. `num_buffers` is the host's and has no effect: the next chunk is
        gathered while one is being sent.
        """
        refuse_scales(kv_scales)
        if self._collective is None:
            raise RefitError("no engine has joined: call init_collective first")
        size = _whole(buffer_size_bytes)
        return self.policy.refit(self._collective.transport(size), adapters=adapters).speed

    def begin_refit_for_collective(
        self, kv_scales: Any = None, buffer_size_bytes: int | None = None, adapters: bool = False
    ) -> None:
        """Begin what `broadcast_weights_for_collective` does, as `MegatronPolicy.begin_refit`."""
        refuse_scales(kv_scales)
        if self._collective is None:
            raise RefitError("no engine has joined: call init_collective first")
        transport = self._collective.transport(_whole(buffer_size_bytes))
        self.policy.begin_refit(transport, adapters=adapters)

    def release_handles(self) -> None:
        """Free the memory of `get_weights_ipc_handles`."""
        if self._handles is not None:
            self._handles.release()

    def close(self) -> None:
        """Free that memory, and leave the group of `init_collective`, if there is one."""
        self.release_handles()
        self._leave()

    def _leave(self) -> None:
        if self._collective is not None:
            self._collective.close()
        self._collective = None


def _whole(nbytes: float | None) -> int | None:
    """Hosts compute sizes of buffers from shares of memory."""
    return int(nbytes) if nbytes else None


def _configured_bytes(config: PolicyConfig) -> int | None:
    size = config.refit_buffer_size_gb
    return None if size is None else int(size * 2**30)
