"""Translates a microbatch's token layout for the model: positions, attention pieces, and
Transformer Engine's parameters. Defines what travels with it through the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_policy.engines.megatron.layers.replay import RouterParams
from megatron_policy.engines.megatron.layers.varlen_attention import (
    VarlenSequences,
    ends,
    varlen_sequences,
)
from megatron_policy.packing.tokens import CausalRectangle, TokenLayout


@dataclass(kw_only=True)
class SequenceParams(PackedSeqParams):
    """Passed through Megatron-Core with the hidden states of a microbatch, also in recomputation,
    from the chunk to rotary embedding and core attention.

    Hidden states stay `[T, R, D]`: Megatron-Core sees "sbhd" here and passes it on unused.
    """

    qkv_format: str = "sbhd"
    positions: torch.Tensor
    """Positions of this rank's tokens within their sequences, int64 `[T]`, on the device."""
    pieces: tuple[CausalRectangle, ...]
    """The pieces of this rank's attention."""
    varlen: VarlenSequences | None
    """The same for a kernel that takes all of them at once; None where there is none."""
    longest: int
    """Length of the longest sequence, including its filler, over all ranks."""
    order: torch.Tensor | None
    """Index that sorts what is gathered from the context-parallel ranks, `[C * T]`, into the order
    of all ranks' positions; None if there is one rank.
    """
    context_group: dist.ProcessGroup
    packed: PackedSeqParams | None
    """The same for Transformer Engine, "thd"; None if rows are padded."""


@dataclass(kw_only=True)
class MicrobatchParams(PackedSeqParams):
    """What `SequenceParams` are, with what the microbatch tells the routers: a layer passes each
    part to where it is read.
    """

    qkv_format: str = "sbhd"
    sequences: SequenceParams | None
    routers: RouterParams


def sequences_of(params: PackedSeqParams | None) -> SequenceParams | None:
    """The sequences among what is passed with a microbatch; None as `sequence_params` has it."""
    found = params.sequences if isinstance(params, MicrobatchParams) else params
    assert found is None or isinstance(found, SequenceParams), type(found)
    return found


def sequence_params(layout: TokenLayout, cp_group: dist.ProcessGroup) -> SequenceParams | None:
    """What the ranks of `cp_group` pass to their chunks for `layout`; None if each row is a
    sequence that starts at its first position and is computed whole by one rank.
    """
    assert layout.ranks == cp_group.size(), (layout.ranks, cp_group.size())
    if layout.plain:
        return None
    rank = cp_group.rank()
    pieces, rows = layout.pieces(rank), layout.sources_CTR.size(2)
    return SequenceParams(
        positions=layout.positions_CT[rank],
        pieces=pieces,
        varlen=varlen_sequences(pieces, rows),
        longest=max(segment.length for segment in layout.segments),
        order=layout.order_CT if layout.ranks > 1 else None,
        context_group=cp_group,
        packed=_packed(layout) if len(layout.segments) > 1 else None,
    )


def _packed(layout: TokenLayout) -> PackedSeqParams:
    """Filler counts as tokens here: nothing attends to it, and kernels that skip it would leave its
    output undefined.
    """
    lengths = [segment.length for segment in layout.segments if segment.length]
    sums = ends(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=sums,
        cu_seqlens_kv=sums,
        cu_seqlens_q_padded=sums,
        cu_seqlens_kv_padded=sums,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
