"""Exchanges heads for tokens among context-parallel ranks, and back.

A rank holds pieces of every sequence, and a recurrence needs a sequence's tokens in order. So each
rank gets all tokens of some of the heads, computes those alone, and gives every rank its tokens
back. What travels per token is the rank's part of a projection, of which C - 1 of C ranks need a
share: less than a gather of all tokens, which would have every rank compute all heads besides.

A projection's columns are sections (queries, keys, values, gates), each of heads in a row. Of a
section with fewer heads than ranks, neighbours get the same head, and its gradients are summed.
Whatever belongs to heads (taps, A_log, D, biases) is cut to `share_heads` of the rank in the
forward pass: its gradient is then zero elsewhere, and summed over the ranks as that of all weights.

Shapes: T positions of a rank, C ranks, R rows, F columns of a projection, V channels of an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_policy.parallel.groups import exchange, swap


def share_heads(sections: Sequence[tuple[int, int]], ranks: int) -> torch.Tensor:
    """Which columns each of `ranks` computes of sections of so many heads and columns of each,
    `[C, F']` with as many for every rank. Made on the CPU.
    """
    shares: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    start = 0
    for heads, width in sections:
        assert heads % ranks == 0 or ranks % heads == 0, (heads, ranks)
        count = max(1, heads // ranks) * width
        for rank, share in enumerate(shares):
            share.append(torch.arange(count) + start + rank * heads // ranks * width)
        start += heads * width
    return torch.stack([torch.cat(share) for share in shares])


@dataclass(frozen=True)
class HeadExchange:
    """The exchange within `group` for one layout of tokens."""

    order_CT: torch.Tensor
    """Index that sorts what is gathered from the ranks, `[C * T]`, into the order of all ranks'
    positions.
    """
    group: dist.ProcessGroup

    def to_heads(self, x_TRF: torch.Tensor, shares_CF: torch.Tensor) -> torch.Tensor:
        """This rank's columns of `share_heads` at all positions in order, `[C * T, R, F']`."""
        ranks = self.group.size()
        shared = x_TRF.index_select(-1, shares_CF.flatten()).unflatten(-1, (ranks, -1))
        by_rank = self._swap(shared.movedim(-2, 0))
        return by_rank.flatten(0, 1).index_select(0, self.order_CT)

    def to_tokens(self, y_SRV: torch.Tensor) -> torch.Tensor:
        """All ranks' channels at this rank's positions, `[T, R, C * V]`; of all positions
        `[C * T, R, V]` each rank has some of the heads.
        """
        by_rank = y_SRV.index_select(0, self.order_CT.argsort())
        heads = self._swap(by_rank.unflatten(0, (self.group.size(), -1)))
        return heads.movedim(0, -2).flatten(-2)

    def _swap(self, x: torch.Tensor) -> torch.Tensor:
        # Its own transpose.
        return exchange(x, lambda x: swap(x, self.group), lambda grad: swap(grad, self.group))
