"""The largest logits of a language-model head from hidden states, holding no more than a tile of
logits.

Shapes: N tokens, V entries of this rank's slice of the vocabulary, D model, R rows and W entries of
a tile, K candidates.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist

from megatron_policy.lm_head.filters import order_bits
from megatron_policy.lm_head.fused_tiles import (
    HeadShape,
    buffer,
    multiply,
    tiling,
)
from megatron_policy.lm_head.tile_work import finish_logits

NO_CANDIDATE = torch.iinfo(torch.int64).min


@torch.no_grad()
def fused_topk(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    k: int,
    head: HeadShape,
    group: dist.ProcessGroup,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest logits, fp32, and their entries of the vocabulary, int64: `[N, K]`, largest
    first, ties by the lowest entry; the same on every rank of `group`.

    `k` is at most the size of the vocabulary; not differentiable.
    """
    hidden_ND, device = hidden_ND.to(weight_VD.dtype), weight_VD.device
    plan = tiling(hidden_ND.size(0), weight_VD.size(0), head.real, chunk)
    products = buffer(plan.height, plan.width, weight_VD.dtype, device)
    work = buffer(plan.strip, plan.width, torch.float32, device)
    best_NK = torch.full((hidden_ND.size(0), k), NO_CANDIDATE, device=device)
    for tile in chain.from_iterable(plan.columns()):
        product_RW = multiply(hidden_ND, weight_VD, tile, products)
        for rows, inside in plan.strips(tile):
            logits_RW = finish_logits(product_RW[inside], head, work)
            # Keys are larger for larger logits and, for equal ones, for lower entries. No two are
            # equal, so that the result does not depend on the tiles or ranks that found them.
            bits_RW = logits_RW.add_(0.0).view(torch.int32)  # adding 0 makes -0 equal to 0
            first = head.vocab_start + tile.entries.start
            entries_W = torch.arange(first, first + logits_RW.size(1), device=device)
            keys_RW = order_bits(bits_RW).long().mul_(2**32).add_(2**32 - 1 - entries_W)
            found = keys_RW.topk(min(k, keys_RW.size(1))).values
            best_NK[rows] = torch.cat([best_NK[rows], found], dim=1).topk(k).values
    if group.size() > 1:
        parts = [torch.empty_like(best_NK) for _ in range(group.size())]
        dist.all_gather(parts, best_NK, group=group)
        best_NK = torch.cat(parts, dim=1).topk(k).values
    values_NK = order_bits((best_NK >> 32).int()).view(torch.float32)
    return values_NK, 2**32 - 1 - (best_NK & (2**32 - 1))
