"""What a worker reports to the host about itself: node, device, parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import ray
import torch

from megatron_policy import device
from megatron_policy.device import allocated
from megatron_policy.device.profiling import device_name
from megatron_policy.workers.worker.assigned_gpu import given_by_ray

_MIB = 2**20


def node_and_device() -> tuple[str, int]:
    """This node's address, and the number of the GPU that Ray gave this worker (a logical one if
    the machine has none); LOCAL_RANK if Ray gave none.
    """
    given = given_by_ray()
    number = int(given[0]) if given else int(os.environ.get("LOCAL_RANK", "0"))
    return ray.util.get_node_ip_address(), number


def device_info() -> dict[str, Any]:
    """The host's keys besides our own: the device, its memory in MiB, the rank's environment."""
    return {
        "local_device_id": device.current_device().index or 0,
        "global_device_id": node_and_device()[1],
        "device_count": device.accelerators(),
        "device_name": device_name(),
        "memory_allocated_mb": allocated() / _MIB,
        "peak_memory_allocated_mb": device.memory_info().peak / _MIB,
        "env_vars": {key: os.environ[key] for key in _SHOWN if key in os.environ},
    }


_SHOWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def tensor_parallel_attributes(
    named: Iterator[tuple[str, torch.Tensor]], tp_size: int
) -> dict[str, Any]:
    """How Megatron-Core has marked each parameter: `tp_params` are split over tensor-parallel
    ranks in `partition_dim`, `non_tp_params` are whole on each rank.
    """
    split: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    for name, parameter in named:
        if not isinstance(parameter, torch.nn.Parameter):
            continue
        shape, marked = list(parameter.shape), getattr(parameter, "tensor_model_parallel", False)
        found = {"name": f"module.{name}", "tensor_model_parallel": marked, "shape": shape}
        if marked:
            found["partition_dim"] = getattr(parameter, "partition_dim", None)
            found["partition_stride"] = getattr(parameter, "partition_stride", None)
        (split if marked else whole).append(found)
    return {
        "tp_params": split,
        "non_tp_params": whole,
        "total_params": len(split) + len(whole),
        "tp_size": tp_size,
    }
