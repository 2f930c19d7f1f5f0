"""Cuts attention into rectangular tiles, and computes one on torch's kernels, fused or with
materialised scores.

Shapes: S queries, K keys, B rows, N query heads, G key-value groups, H head dim (can differ for
values).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from megatron_policy.device import is_accelerated
from megatron_policy.packing.tokens import AttentionPiece

# Queries per tile of a window: few enough that most keys of the tile are in all their windows.
BLOCK = 512
# Mask rows are a multiple of this long: kernels would otherwise copy masks to align them.
_ALIGNMENT = 16


@dataclass(frozen=True)
class AttentionTile:
    """Queries `[query, query + queries)` see keys `[key, key + keys)`, aligned at the lower right
    corner, or each of them all, of which `ahead` are beyond the last query's own. If `reach` is not
    None, a query sees no key further back than that.
    """

    query: int
    queries: int
    key: int
    keys: int
    reach: int | None
    ahead: int | None = None

    @property
    def shape(self) -> tuple[int, int, int | None, int | None]:
        """Everything its mask depends on."""
        return self.queries, self.keys, self.reach, self.ahead


def tiles(
    pieces: Iterable[AttentionPiece], reach: int | None, explicit: bool = False
) -> tuple[AttentionTile, ...]:
    """The tiles of these pieces, in the order of their queries; `reach` is that of a sliding
    window, in positions before a query's own.

    With a window or explicit scores a tile has at most one block of queries.
    """
    found: list[AttentionTile] = []
    for piece in pieces:
        if piece.queries == 0:
            continue
        whole = reach is None or piece.keys - (piece.ahead or 0) <= reach + 1
        if whole and not explicit:
            sizes = (piece.query, piece.queries, piece.key, piece.keys)
            found.append(AttentionTile(*sizes, None, piece.ahead))
        else:
            found.extend(_blocks(piece, reach))
    return tuple(found)


def _blocks(piece: AttentionPiece, reach: int | None) -> Iterator[AttentionTile]:
    before = piece.keys - (piece.ahead or 0) - piece.queries
    for start in range(0, piece.queries, BLOCK):
        queries = min(BLOCK, piece.queries - start)
        own = before + start + queries
        ahead = None if piece.ahead is None else piece.keys - own
        end = own + (ahead or 0)
        keys, hidden = end, None
        if reach is not None:
            seen = queries + reach + end - own
            if queries > 1:
                seen += -seen % _ALIGNMENT
            keys = min(end, seen)
            hidden = reach if keys - (end - own) > reach + 1 else None
        first = piece.key + end - keys
        yield AttentionTile(piece.query + start, queries, first, keys, hidden, ahead)


def fused_bias(tile: AttentionTile, like: torch.Tensor) -> Any:
    """The bias `fused` needs for a tile; None if the tile is square or all keys are seen."""
    if tile.reach is None and (tile.ahead is not None or tile.queries in (1, tile.keys)):
        return None
    if tile.reach is not None or not is_accelerated():
        return mask(tile, like)
    # Without elements, for kernels that support this shape. (torch's own constructor allocates two
    # scores for each query and key, in host memory.)
    bias: CausalBias = torch.empty(0).as_subclass(CausalBias)
    bias.variant = CausalVariant.LOWER_RIGHT
    bias.seq_len_q, bias.seq_len_kv = tile.queries, tile.keys
    return bias


def fused(
    query_BNSH: torch.Tensor,
    key_BGKH: torch.Tensor,
    value_BGKH: torch.Tensor,
    bias: Any,
    scale: float,
    dropout: float,
    causal: bool = True,
) -> torch.Tensor:
    """Context `[B, N, S, H]`; no kernel holds scores of `[S, K]`. Without a bias, all keys are seen
    unless it is `causal`.
    """
    width = value_BGKH.size(-1)
    if query_BNSH.size(-1) != width:
        # Kernels need equal head sizes; zero padding changes no product.
        largest = max(query_BNSH.size(-1), width)
        query_BNSH, key_BGKH, value_BGKH = (
            F.pad(x, (0, largest - x.size(-1))) for x in (query_BNSH, key_BGKH, value_BGKH)
        )
    grouped = query_BNSH.size(1) != key_BGKH.size(1)
    # On an accelerator a kernel that holds no scores needs a key head for each query head, unless
    # it is flash attention.
    half = query_BNSH.dtype in (torch.bfloat16, torch.float16)
    flash = half and type(bias) is not torch.Tensor
    if grouped and is_accelerated() and not flash:
        key_BGKH, value_BGKH = _repeat_groups(query_BNSH, key_BGKH, value_BGKH)
        grouped = False
    context_BNSH = F.scaled_dot_product_attention(
        query_BNSH,
        key_BGKH,
        value_BGKH,
        attn_mask=bias,
        dropout_p=dropout,
        is_causal=causal and bias is None and query_BNSH.size(2) > 1,
        scale=scale,
        enable_gqa=grouped,
    )
    return context_BNSH[..., :width]


def explicit(
    query_BNSH: torch.Tensor,
    key_BGKH: torch.Tensor,
    value_BGKH: torch.Tensor,
    bias_SK: torch.Tensor,
    scale: float,
    dropout: float,
    cap: float | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    """As `fused`, with softcapped scores, and one score per head that attends to nothing."""
    key_BNKH, value_BNKH = _repeat_groups(query_BNSH, key_BGKH, value_BGKH)
    scores_BNSK = query_BNSH @ key_BNKH.mT * scale
    if cap is not None:
        scores_BNSK = softcap(scores_BNSK, cap)
    scores_BNSK = scores_BNSK + bias_SK
    if sinks_N is not None:
        sinks_BNS1 = sinks_N[:, None, None].expand(*scores_BNSK.shape[:-1], 1)
        scores_BNSK = torch.cat([scores_BNSK, sinks_BNS1], -1)
    weights_BNSK = scores_BNSK.softmax(-1, dtype=torch.float32).to(query_BNSH.dtype)
    weights_BNSK = weights_BNSK[..., : key_BNKH.size(2)]
    return F.dropout(weights_BNSK, dropout) @ value_BNKH


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(x / cap)`: close to `x` where it is small, never beyond the cap.

    Source: "Gemma 2: Improving Open Language Models at a Practical Size" (2024).
    """
    return torch.tanh(x / cap) * cap


def _repeat_groups(
    query_BNSH: torch.Tensor, *states_BGKH: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    shared = query_BNSH.size(1) // states_BGKH[0].size(1)
    return tuple(x.repeat_interleave(shared, 1) for x in states_BGKH)


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
