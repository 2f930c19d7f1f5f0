"""Moves a model to a device given by name, as the host's workers do."""

from __future__ import annotations

from typing import TypeVar

import torch

from megatron_policy.device import current_device
from megatron_policy.device.caches import release_cached
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
