"""Finds the device memory of each kind that a policy holds.

Memory is counted by storage, not by tensor: parameters can be views of their chunk's buffer, and an
optimizer's main parameters can be views of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_policy.device import current_device
from megatron_policy.engines.megatron.optimizer import WrappedModel
from megatron_policy.memory.states import Kind, Storages

SMALLEST_BYTES = 1024
"""Smaller storages are never moved: that would free nothing."""


def resident_storages(
    models: Sequence[torch.nn.Module], trainable: WrappedModel | None
) -> Storages:
    """The storages that are on the device now, each once, in the same order at every call.

    A storage shared by several kinds belongs to the first of parameters, gradients, optimizer.
    Optimizer state that a step has added since the last call is included; storages that are in host
    memory, emptied or small are not.
    """
    seen: set[int] = set()
    found: Storages = {kind: [] for kind in Kind}
    for kind, tensor in _tensors(models, trainable):
        storage = tensor.untyped_storage()
        counts = tensor.device == current_device() and storage.nbytes() >= SMALLEST_BYTES
        if counts and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[kind].append(storage)
    return found


def forget_gradients(trainable: WrappedModel) -> None:
    """Drop the gradients that an optimizer step has left outside the buffers; a step recreates
    them.
    """
    trainable.optimizer.zero_grad()


def _tensors(
    models: Sequence[torch.nn.Module], trainable: WrappedModel | None
) -> Iterator[tuple[Kind, torch.Tensor]]:
    parameters = [parameter for model in models for parameter in model.parameters()]
    for tensor in [*parameters, *(buffer for model in models for buffer in model.buffers())]:
        yield Kind.PARAMETERS, tensor
    if trainable is None:
        return
    buffers = [each for c in trainable.chunks for each in (*c.buffers, *c.expert_parallel_buffers)]
    inner = list(_optimizers(trainable.optimizer))
    mains = [main for each in inner for group in each.param_groups for main in group["params"]]
    for buffer in buffers:
        yield Kind.GRADIENTS, buffer.grad_data
    for tensor in (*parameters, *mains):
        for name in ("grad", "main_grad", "decoupled_grad"):
            gradient = getattr(tensor, name, None)
            if gradient is not None:
                yield Kind.GRADIENTS, gradient
    for main in mains:
        yield Kind.OPTIMIZER, main
    for state in (state for each in inner for state in each.state.values()):
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield Kind.OPTIMIZER, value


def _optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """The plain optimizers at the leaves; a rank that trains nothing in a group has none there."""
    if isinstance(optimizer, ChainedOptimizer):
        for chained in optimizer.chained_optimizers:
            yield from _optimizers(chained)
    elif optimizer.optimizer is not None:
        yield optimizer.optimizer
