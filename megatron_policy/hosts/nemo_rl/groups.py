"""Joins the group of training ranks and the host's engines, with the host's own classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_policy import device
from megatron_policy.device.caches import release_cached
from megatron_policy.hosts.nemo_rl.host_imports import accepted, part_or_none


def join_engines(ip: str, port: int, rank: int, world_size: int, options: Mapping[str, Any]) -> Any:
    """An object with `broadcast(tensor, src)` among all ranks; this one is `rank` of `world_size`.

    From 0.6 on the host has its own group; before that it uses vLLM's, which is then installed with
    it. NotImplementedError if neither is there. Of `options`, `nccl_peer` is how the engines
    initialise (newest hosts).
    """
    release_cached()  # free memory for the group's buffers, which torch does not allocate
    here = device.current_device().index
    meeting = part_or_none("nemo_rl.distributed.stateless_process_group", "StatelessProcessGroup")
    if meeting is not None:
        group = meeting(master_address=ip, port=port, rank=rank, world_size=world_size)
        begin = group.init_nccl_communicator
        begin(device=here, **accepted(begin, {"peer": options.get("nccl_peer") or "nemo"}))
        return group
    meeting = part_or_none("vllm.distributed.utils", "StatelessProcessGroup")
    kind = part_or_none("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator")
    if meeting is None or kind is None:
        raise NotImplementedError(
            "init_collective is not built for this NeMo RL: it has no "
            "nemo_rl.distributed.stateless_process_group, and vLLM, whose group it would take, is "
            "not installed where training runs"
        )
    met = meeting.create(host=ip, port=port, rank=rank, world_size=world_size)
    return kind(met, device=here)
