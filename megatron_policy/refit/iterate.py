"""A refit as a plain iteration over named tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.exporter import Exporter
from megatron_policy.refit.plan import RefitPlan, RefitTensor


def tensors(exporter: Exporter, plan: RefitPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each HF tensor of the plan by name, in its own memory, which the caller may keep.

    The iteration ends when every rank has reached its end; RefitError if one of them does not.
    """

    def place(tensor: RefitTensor) -> BufferSlice:
        return BufferSlice(Buffer.on(exporter.device, tensor.nbytes), 0)

    exporter.begin()
    for tensor, room in exporter.stream(plan, place):
        assert room is not None
        yield tensor.name, room.tensor(tensor.shape, tensor.dtype)
    # Even if nothing was exchanged: another rank may not have reached its first tensor yet.
    exporter.agree(None)
