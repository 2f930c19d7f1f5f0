"""Cuts causal attention into rectangular tiles, and masks the keys that their queries do not see.

Shapes: Q queries, K keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_policy.packing.tokens import CausalRectangle

# Queries per tile of a window: few enough that most keys of the tile are in all their windows.
BLOCK = 512
# Mask rows are a multiple of this long: kernels would otherwise copy masks to align them.
_ALIGNMENT = 16


@dataclass(frozen=True)
class AttentionTile:
    """Queries `[query, query + queries)` see keys `[key, key + keys)`, aligned at the lower right
    corner. If `reach` is not None, a query sees no key further back than that.
    """

    query: int
    queries: int
    key: int
    keys: int
    reach: int | None

    @property
    def shape(self) -> tuple[int, int, int | None]:
        """Everything its mask depends on."""
        return self.queries, self.keys, self.reach


def tiles(
    pieces: Iterable[CausalRectangle], reach: int | None, explicit: bool = False
) -> tuple[AttentionTile, ...]:
    """The tiles of these pieces, in the order of their queries; `reach` is that of a sliding
    window, in positions before a query's own.

    With a window or explicit scores a tile has at most one block of queries.
    """
    found: list[AttentionTile] = []
    for piece in pieces:
        if piece.queries == 0:
            continue
        whole = reach is None or piece.keys <= reach + 1
        if whole and not explicit:
            found.append(AttentionTile(piece.query, piece.queries, piece.key, piece.keys, None))
        else:
            found.extend(_blocks(piece, reach))
    return tuple(found)


def _blocks(piece: CausalRectangle, reach: int | None) -> Iterator[AttentionTile]:
    before = piece.keys - piece.queries
    for start in range(0, piece.queries, BLOCK):
        queries = min(BLOCK, piece.queries - start)
        end = before + start + queries
        keys, hidden = end, None
        if reach is not None:
            seen = queries + reach
            if queries > 1:
                seen += -seen % _ALIGNMENT
            keys = min(end, seen)
            hidden = reach if keys > reach + 1 else None
        yield AttentionTile(piece.query + start, queries, piece.key + end - keys, keys, hidden)


def mask(tile: AttentionTile, like: torch.Tensor) -> torch.Tensor:
    """The bias on the tile's scores, `[Q, K]`: 0 where a query sees a key, -inf elsewhere."""
    key = torch.arange(tile.keys, device=like.device)
    query = key[tile.keys - tile.queries :].unsqueeze(1)
    seen = key <= query
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
