"""Causal scaled dot-product attention over the sequences of a microbatch, in which blocks of tokens
can see each other in both directions.

Shapes: S query positions, K key positions, B rows, N query heads, G key-value groups, H head dim
(can differ for values), T positions of a context-parallel rank, C ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.attention.tile_attention import cut, explicit, fused, fused_bias, mask, tiles
from megatron_policy.attention.varlen_attention import (
    VarlenSequences,
    supports,
    varlen_attention,
    varlen_rows,
    varlen_sequences,
)
from megatron_policy.packing.tokens import AttentionPiece, Blocks, TokenLayout
from megatron_policy.parallel.groups import exchange, gather, sum_scatter


@dataclass(kw_only=True)
class Sequences:
    """Where the sequences of a microbatch are."""

    pieces: tuple[tuple[int, tuple[AttentionPiece, ...]], ...]
    """How many neighbouring rows have the same pieces of this rank's attention, and these."""
    varlen: VarlenSequences | None
    """The same for a kernel that takes all of them at once; None where there is none, or where they
    are not causal.
    """
    lengths: tuple[int, ...]
    """Of all sequences of a row, including their filler, over all ranks."""
    order: torch.Tensor | None
    """Index that sorts what is gathered from the context-parallel ranks, `[C * T]`, into the order
    of all ranks' positions; None if there is one rank.
    """
    context_group: dist.ProcessGroup

    @property
    def longest(self) -> int:
        """Length of the longest sequence, including its filler, over all ranks."""
        return max(self.lengths)

    @property
    def causal(self) -> bool:
        """Whether no query sees a key beyond its own."""
        return all(piece.ahead is None for _, pieces in self.pieces for piece in pieces)


def sequences_in(
    layout: TokenLayout, cp_group: dist.ProcessGroup, blocks_B: Blocks = ()
) -> Sequences:
    """The sequences that this rank of `cp_group` computes of `layout`, which each rank can compute
    whole, with these blocks of the caller's rows.
    """
    assert layout.ranks in (1, cp_group.size()), (layout.ranks, cp_group.size())
    rank = cp_group.rank() % layout.ranks
    pieces, rows = layout.pieces_by_rows(rank, blocks_B), layout.sources_CTR.size(2)
    return Sequences(
        pieces=pieces,
        varlen=None if blocks_B else varlen_sequences(pieces[0][1], rows),
        lengths=tuple(segment.length for segment in layout.segments),
        order=layout.order_CT if layout.ranks > 1 else None,
        context_group=cp_group,
    )


@dataclass(frozen=True)
class Scores:
    """How scores are computed from queries and keys.

    They are materialised only if they are softcapped or there are sinks (learnt scores of each head
    that attend to nothing): the fused kernels support neither.
    """

    scale: float
    reach: int | None = None
    """Of a sliding window, in positions before a query's own; None: all keys are seen."""
    softcap: float | None = None
    sinks_N: torch.Tensor | None = None
    dropout: float = 0.0
    random_state: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The state of random numbers that dropout draws from."""

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernels can compute them."""
        return self.softcap is None and self.sinks_N is None


def attend(
    query_SBNH: torch.Tensor,
    key_KBGH: torch.Tensor,
    value_KBGH: torch.Tensor,
    scores: Scores,
    sequences: Sequences | None = None,
) -> torch.Tensor:
    """The context `[S, B, N*H]`. Without `sequences` each row is one sequence whose keys are all on
    this rank; `S < K` means the last S positions of a cache of K.

    Right padding needs no mask: no valid position can see a later one. Where torch and the device
    have a kernel that takes all sequences at once, it is called once.
    """
    whole = AttentionPiece(0, query_SBNH.size(0), 0, key_KBGH.size(0))
    pieces: tuple[tuple[int, tuple[AttentionPiece, ...]], ...] = ((query_SBNH.size(1), (whole,)),)
    if sequences is not None:
        pieces = sequences.pieces
        if sequences.order is not None:
            key_KBGH, value_KBGH = gather_keys(
                key_KBGH, value_KBGH, sequences.order, sequences.context_group
            )
    states = (query_SBNH, key_KBGH, value_KBGH)
    varlen = None
    if scores.fused and scores.dropout == 0 and supports(query_SBNH, value_KBGH):
        if sequences is not None:
            varlen = sequences.varlen
        # Without a window, or for one query, a single tile without a mask is one call too.
        elif scores.reach is not None and query_SBNH.size(0) != 1:
            varlen = varlen_rows(query_SBNH, key_KBGH)
    if varlen is not None:
        return varlen_attention(*states, varlen, scores.scale, scores.reach).flatten(2)
    if len(pieces) == 1:
        return _tiled(*states, scores, pieces[0][1])
    counts = [rows for rows, _ in pieces]
    query, key, value = (each.split(counts, 1) for each in states)
    by_rows = zip(query, key, value, pieces, strict=True)
    return torch.cat([_tiled(q, k, v, scores, of) for q, k, v, (_, of) in by_rows], 1)


def _tiled(
    query_SBNH: torch.Tensor,
    key_KBGH: torch.Tensor,
    value_KBGH: torch.Tensor,
    scores: Scores,
    pieces: tuple[AttentionPiece, ...],
) -> torch.Tensor:
    """The context of each tile by itself, `[S, B, N*H]`."""
    parts = tiles(pieces, scores.reach, explicit=not scores.fused)
    queries, keys = ([(t.query, t.queries) for t in parts], [(t.key, t.keys) for t in parts])
    states = (cut(query_SBNH, queries), cut(key_KBGH, keys), cut(value_KBGH, keys))
    bias_of = fused_bias if scores.fused else mask
    # Most tiles share their shape with another.
    biases = {tile.shape: bias_of(tile, query_SBNH) for tile in parts}
    contexts = []
    with scores.random_state():
        for tile, *own in zip(parts, *states, strict=True):
            query_BNSH, key_BGKH, value_BGKH = (x.permute(1, 2, 0, 3) for x in own)
            inputs = (query_BNSH, key_BGKH, value_BGKH, biases[tile.shape])
            if scores.fused:
                context_BNSH = fused(*inputs, scores.scale, scores.dropout, tile.ahead is None)
            else:
                how = (scores.scale, scores.dropout, scores.softcap, scores.sinks_N)
                context_BNSH = explicit(*inputs, *how)
            contexts.append(context_BNSH.permute(2, 0, 1, 3))
    whole_SBNH = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    return whole_SBNH.flatten(2)


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

    def give_back(grad: torch.Tensor) -> torch.Tensor:
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
        by_rank[order] = grad
        return sum_scatter(by_rank, group)

    both = torch.cat([key_TBGH, value_TBGH], -1)
    every = exchange(both, lambda own: gather(own, group)[order], give_back)
    key, value = every.split([key_TBGH.size(-1), value_TBGH.size(-1)], -1)
    return key, value
