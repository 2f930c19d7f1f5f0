"""Gathers the keys and values of all context-parallel ranks on each of them.

Shapes: T positions of a rank, C ranks, B rows, G key-value groups, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def gather_keys(
    key_TBGH: torch.Tensor,
    value_TBGH: torch.Tensor,
    order: torch.Tensor,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all ranks' positions in order, `[C * T, B, G, H]`, in one collective.

    Values can have a different head size. Gradients are summed over the ranks in the dtype of the
    keys.
    """
    both = torch.cat([key_TBGH, value_TBGH], -1)
    apply: Callable[..., torch.Tensor] = _Gather.apply
    key, value = apply(both, order, group).split([key_TBGH.size(-1), value_TBGH.size(-1)], -1)
    return key, value


class _Gather(torch.autograd.Function):
    """Gathers `[T, ...]` of each rank to `[C * T, ...]`; output i is entry `order[i]` of the ranks'
    concatenation.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.group = group
        by_rank = local.new_empty(order.numel(), *local.shape[1:])
        dist.all_gather_into_tensor(by_rank, local.contiguous(), group=group)
        return by_rank[order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,), (order,) = grads, ctx.saved_tensors
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
        by_rank[order] = grad
        own = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, by_rank, group=ctx.group)
        return own, None, None
