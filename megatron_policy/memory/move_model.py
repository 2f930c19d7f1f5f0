"""Moves a model to a device given by name, and makes a sharded one whole, as hosts' workers do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_policy.device import current_device, is_accelerated, release_cached, synchronize
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.states import Kind

Model = TypeVar("Model", bound=torch.nn.Module)


def move_to_device(memory: DeviceMemory, model: Model, device: str | torch.device) -> Model:
    """Return `model` with its parameters and buffers on `device`.

    A chunk of the policy moves with all the policy's parameters, as `offload` and `onload` do:
    "cpu" is host memory, anything else the policy's device. Another model moves by itself.
    """
    if not memory.manages(model):
        return model.to(device)
    if torch.device(device).type == "cpu":
        memory.offload(Kind.PARAMETERS)
    else:
        memory.onload(Kind.PARAMETERS)
    return model


def move_to_host(memory: DeviceMemory, model: Model) -> Model:
    """Return `model` with parameters and buffers in host memory; frees those on the device."""
    moved = move_to_device(memory, model, "cpu")
    release_cached()
    return moved


def move_to_own_device(memory: DeviceMemory, model: Model) -> Model:
    """Return `model` with its parameters and buffers on the policy's device."""
    if memory.manages(model):
        memory.onload(Kind.PARAMETERS)
        return model
    return model.to(current_device())


def move_buffers(memory: DeviceMemory, model: Model, device: str | torch.device) -> Model:
    """Return `model` with its buffers on `device`; those of the policy's chunks move only with the
    parameters.
    """
    if not memory.manages(model):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    return model


@contextmanager
def unshard_fsdp2_model(model: torch.nn.Module) -> Iterator[None]:
    """Within this context every parameter of `model`, which FSDP2 has sharded, is whole.

    Collective over the ranks that share it; `model` is the module that was sharded first, or one
    around it. For reading: what is written to a whole parameter is lost.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module in sharded:
            module.unshard()
        yield
    finally:
        for module in sharded:
            module.reshard()


@torch.no_grad()
def get_cpu_state_dict(
    state_generator: Iterable[tuple[str, torch.Tensor]], pin_memory: bool = False
) -> dict[str, torch.Tensor]:
    """Copies in host memory of the named tensors, of a sharded one this rank's part; pinned where
    there is a GPU to copy them to.
    """
    copies = {}
    for name, tensor in state_generator:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        copies[name] = torch.empty(
            own.shape, dtype=own.dtype, device="cpu", pin_memory=pin_memory and is_accelerated()
        )
        copies[name].copy_(own, non_blocking=True)
    if is_accelerated():
        synchronize()
    return copies
