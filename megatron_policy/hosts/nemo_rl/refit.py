"""Refits to the host's engines, in the host's own protocols where its engines can run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
import torch

from megatron_policy import device
from megatron_policy.device import release_cached
from megatron_policy.errors import RefitError
from megatron_policy.hosts.nemo_rl.host_imports import find_part, select_accepted
from megatron_policy.refit.transports.ipc.protocol import Dialect
from megatron_policy.workers.assigned_gpu import list_given_gpus
from megatron_policy.workers.checks import refuse_scales
from megatron_policy.workers.refits import EngineRefits

if TYPE_CHECKING:
    from megatron_policy.policy import MegatronPolicy


class HostRefits(EngineRefits):
    """Sends weights to the engines that NeMo RL has started.

    On GPUs they are the host's unmodified vLLM workers. Over a socket they get our stream in the
    host's dialect: packs of `(handle, names, used bytes)`, each tensor at a multiple of 512 bytes,
    in two alternating buffers, and the host's end marker. Over a group they get the broadcasts of
    the host's own producer in the host's own group. Without a GPU the host has no engine, and both
    ways are those of our own `Receiver`; over a socket, one that Ray has placed as this worker
    listens at `cpu_address`. Every method is collective.
    """

    _joined = False
    _engines: Any = None
    """The host's own group, on a rank that has joined it."""

    def __init__(self, policy: MegatronPolicy, *, share_devices: bool) -> None:
        """`share_devices` is whether engines compute on the training ranks' devices."""
        super().__init__(policy)
        self._share_devices = share_devices

    def announce_weights(self) -> Any:
        """{HF name: (shape, dtype)} of what will be sent, in that order; with the number of
        elements as a third value if the host's policy itself groups tensors for engines on the same
        devices (0.3).
        """
        policy = find_part("nemo_rl.models.policy.interfaces", "ColocatablePolicyInterface")
        groups = policy is not None and hasattr(policy, "prepare_weights_for_ipc")
        info = self.prepare_refit_info(with_numel=groups and self._share_devices)
        # The host's engines call `numel` on the shape.
        return {name: (torch.Size(shape), *rest) for name, (shape, *rest) in info.items()}

    def get_refit_address(self) -> str:
        """The address that `stream_weights_via_ipc_zmq` binds on this rank."""
        alone = serves_host_engines() or not ray.is_initialized()
        return super().get_refit_address() if alone else cpu_address()

    def stream_weights_via_ipc_zmq(
        self,
        buffer_size_bytes: int | None = None,
        kv_scales: Any = None,
        adapters: bool = False,
    ) -> None:
        """Send all weights, or the `adapters` alone, to the engine on this rank's device, in two
        buffers of half of `buffer_size_bytes` each; returns when it has loaded them.

        RefitError on every rank if any rank's engine does not reply in time.
        """
        from megatron_policy.refit.transports.ipc.transport import IpcStream

        refuse_scales(kv_scales)
        protocol = find_part("nemo_rl.models.policy.utils", "IPCProtocol")
        if not serves_host_engines() or protocol is None:
            super().stream_weights_via_ipc_zmq(buffer_size_bytes, adapters=adapters)
            return
        dialect = Dialect(end=protocol.COMPLETE)
        transport = IpcStream(buffer_bytes=buffer_size_bytes or None, dialect=dialect)
        self.policy.refit(transport, adapters=adapters)

    def meet_engines(
        self,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int | None = None,
        **options: Any,
    ) -> None:
        """Meet the engines at `ip`:`port`. `world_size` counts them and all training ranks, which
        are the first `train_world_size`; without that (0.3), only the first training rank, which
        then joins alone. The `options` that this host's group accepts are passed on.
        """
        if not serves_host_engines():
            # How the host's engines join matters on GPUs only.
            self.init_collective(ip, port, world_size, train_world_size)
            return
        self._joined, self._engines = True, None
        if train_world_size is not None or self.policy.rank == 0:
            self._engines = join_engines(ip, port, self.policy.rank, world_size, options)

    def broadcast_weights_for_collective(
        self,
        kv_scales: Any = None,
        buffer_size_bytes: int | None = None,
        num_buffers: int | None = None,
        adapters: bool = False,
    ) -> None:
        """Send all weights, or the `adapters` alone, to the engines that joined, in broadcasts of
        `buffer_size_bytes` from `num_buffers` alternating buffers (None: the host's defaults); one
        broadcast per tensor if the host does not pack them (0.3).
        """
        refuse_scales(kv_scales)
        if not serves_host_engines():
            super().broadcast_weights_for_collective(
                buffer_size_bytes=buffer_size_bytes, adapters=adapters
            )
            return
        if not self._joined:
            raise RefitError("no engine has joined: call init_collective first")
        tensors, group = self.policy.export(adapters=adapters), self._engines
        produce = find_part("nemo_rl.utils.packed_tensor", "packed_broadcast_producer")
        if group is not None and produce is not None:
            sizes = {"buffer_size_bytes": buffer_size_bytes, "num_buffers": num_buffers}
            produce(
                iterator=tensors,
                group=group,
                src=0,
                post_iter_func=lambda named: named[1],
                **select_accepted(produce, sizes),
            )
        else:
            for _, tensor in tensors:  # gathered by all ranks, even those that send nothing
                if group is not None:
                    group.broadcast(tensor, src=0)
        # The weights may change only when all of them have been sent.
        device.synchronize()


def serves_host_engines() -> bool:
    """Whether engines are the host's, which run on GPUs only."""
    return device.is_accelerated()


def find_node_and_device() -> tuple[str, int]:
    """This node's address, and the number of the GPU that Ray gave this worker (a logical one if
    the machine has none); LOCAL_RANK if Ray gave none.
    """
    given = list_given_gpus()
    number = int(given[0]) if given else int(os.environ.get("LOCAL_RANK", "0"))
    return ray.util.get_node_ip_address(), number


def cpu_address() -> str:
    """Where a worker without a GPU and its engine meet: in this job, Ray has given both the same
    GPU of this node, which exists in its books alone.
    """
    from megatron_policy.refit.transports.ipc.transport import address_of

    run = ray.get_runtime_context()
    return address_of(
        f"CPU-{run.get_node_id()[:16]}-{run.get_job_id()}-{find_node_and_device()[1]}"
    )


def join_engines(ip: str, port: int, rank: int, world_size: int, options: Mapping[str, Any]) -> Any:
    """An object with `broadcast(tensor, src)` among all ranks; this one is `rank` of `world_size`.

    From 0.6 on the host has its own group; before that it uses vLLM's, which is then installed with
    it. NotImplementedError if neither is there. Of `options`, `nccl_peer` is how the engines
    initialise (newest hosts).
    """
    release_cached()  # free memory for the group's buffers, which torch does not allocate
    here = device.current_device().index
    meeting = find_part("nemo_rl.distributed.stateless_process_group", "StatelessProcessGroup")
    if meeting is not None:
        group = meeting(master_address=ip, port=port, rank=rank, world_size=world_size)
        begin = group.init_nccl_communicator
        begin(device=here, **select_accepted(begin, {"peer": options.get("nccl_peer") or "nemo"}))
        return group
    meeting = find_part("vllm.distributed.utils", "StatelessProcessGroup")
    kind = find_part("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator")
    if meeting is None or kind is None:
        raise NotImplementedError(
            "init_collective is not implemented for this NeMo RL: it has no "
            "nemo_rl.distributed.stateless_process_group, and vLLM, whose group would be used, "
            "is not installed where training runs"
        )
    met = meeting.create(host=ip, port=port, rank=rank, world_size=world_size)
    return kind(met, device=here)
