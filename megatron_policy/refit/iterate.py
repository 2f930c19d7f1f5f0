"""A refit as a plain iteration over named tensors; knows no transport."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.exporter import Exporter
from megatron_policy.refit.plan import RefitPlan, RefitTensor


def tensors(exporter: Exporter, plan: RefitPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Each HF tensor of the plan by name, in memory of its own, which is the caller's to keep.

    It ends when every rank has come to its end; RefitError if one of them has not.
    """

    def place(tensor: RefitTensor) -> BufferSlice:
        return BufferSlice(Buffer.on(exporter.device, tensor.nbytes), 0)

    exporter.begin()
    for tensor, room in exporter.stream(plan, place):
        assert room is not None
        yield tensor.name, room.tensor(tensor.shape, tensor.dtype)
    # Also where nothing was exchanged: another rank may still be on its way to the first tensor.
    exporter.agree(None)
