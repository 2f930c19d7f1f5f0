"""Masks the keys that the queries of an attention tile do not see, and cuts tensors into tiles.

Shapes: Q queries, K keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_policy.packing.tiles import AttentionTile


def mask(tile: AttentionTile, like: torch.Tensor) -> torch.Tensor:
    """The bias on the tile's scores, `[Q, K]`: 0 where a query sees a key, -inf elsewhere."""
    key = torch.arange(tile.keys, device=like.device)
    query = (key[: tile.queries] + tile.keys - (tile.ahead or 0) - tile.queries).unsqueeze(1)
    seen = key <= (query if tile.ahead is None else torch.full_like(query, tile.keys))
    if tile.reach is not None:
        seen &= key >= query - tile.reach
    return like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))


def cut(x: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
    """Views of these (start, length) ranges of the first dimension, which can overlap.

    Their gradients are summed in one tensor, while slicing would make a tensor as large as `x` for
    each of them.
    """
    if list(ranges) == [(0, x.size(0))]:
        return (x,)
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Cut.apply
    return apply(x, tuple(ranges))


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranges: tuple[tuple[int, int], ...]
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.ranges, ctx.shape = ranges, x.shape
        return tuple(x.narrow(0, start, length) for start, length in ranges)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        total = None
        for (start, length), grad in zip(ctx.ranges, grads, strict=True):
            if grad is None:
                continue
            if total is None:
                total = grad.new_zeros(ctx.shape)
            total.narrow(0, start, length).add_(grad)
        return total, None
