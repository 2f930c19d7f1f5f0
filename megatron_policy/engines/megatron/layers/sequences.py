"""Translates a microbatch's token layout for the model: positions, attention pieces, and
Transformer Engine's parameters. Defines what travels with it through the layers.

Shapes: B rows and S positions of the caller, R rows that are computed in parallel, T positions of a
context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_policy.attention.causal import Sequences, sequences_in
from megatron_policy.attention.varlen_attention import ends
from megatron_policy.engines.megatron.layers.replay import RouterParams
from megatron_policy.packing.tokens import Blocks, TokenLayout


@dataclass(kw_only=True)
class SequenceParams(PackedSeqParams, Sequences):
    """Passed through Megatron-Core with the hidden states of a microbatch, also in recomputation,
    from the chunk to rotary embedding and core attention.

    Hidden states stay `[T, R, D]`: Megatron-Core sees "sbhd" here and passes it on unused.
    """

    qkv_format: str = "sbhd"
    positions_TR: torch.Tensor
    """Of this context-parallel rank's tokens, int64, on the device; R is 1 if they are alike in all
    rows. `[T, R, 3]` where a token has three.
    """
    packed: PackedSeqParams | None
    """The same for Transformer Engine, "thd"; None if rows are padded."""
    deep: tuple[torch.Tensor, ...] = ()
    """What the first layers add to their outputs, one after another."""


@dataclass(kw_only=True)
class MicrobatchParams(PackedSeqParams):
    """What `SequenceParams` are, with what the microbatch tells the routers: a layer passes each
    part to where it is read.
    """

    qkv_format: str = "sbhd"
    sequences: SequenceParams | None
    routers: RouterParams


class PromptCache(StaticInferenceContext):
    """What layers keep of rows that grow, and what is known of these from the start."""

    positions_TR: torch.Tensor | None = None
    """Of all tokens, as `SequenceParams` has them; None if they are numbered from 0."""
    deep: tuple[torch.Tensor, ...] = ()
    """What the first layers add to their outputs of the tokens that are read next."""


def sequences_of(params: PackedSeqParams | None) -> SequenceParams | None:
    """The sequences among what is passed with a microbatch; None as `sequence_params` has it."""
    found = params.sequences if isinstance(params, MicrobatchParams) else params
    assert found is None or isinstance(found, SequenceParams), type(found)
    return found


def sequence_params(
    layout: TokenLayout,
    cp_group: dist.ProcessGroup,
    positions_BS: torch.Tensor | None = None,
    deep: tuple[torch.Tensor, ...] = (),
    blocks_B: Blocks = (),
) -> SequenceParams | None:
    """What the ranks of `cp_group` pass to their chunks for `layout`, whose tokens have these
    positions or, if they are None, are numbered from 0 in each sequence; the first layers add
    `deep`, and the tokens of a block see each other in both directions. None if nothing is added,
    tokens are numbered, there is no block, and each row is a sequence that one rank computes whole.
    """
    if layout.plain and positions_BS is None and not deep and not blocks_B:
        return None
    positions_TR = layout.take_positions(cp_group.rank() % layout.ranks, positions_BS)
    packed = None
    if len(layout.segments) > 1:
        # Filler counts as tokens here: nothing attends to it, and kernels that skip it would leave
        # its output undefined.
        lengths = [segment.length for segment in layout.segments if segment.length]
        sums, longest = ends(lengths), max(lengths)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=sums,
            cu_seqlens_kv=sums,
            cu_seqlens_q_padded=sums,
            cu_seqlens_kv_padded=sums,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    return SequenceParams(
        positions_TR=positions_TR if positions_BS is not None else positions_TR[:, :1],
        packed=packed,
        deep=deep,
        **vars(sequences_in(layout, cp_group, blocks_B)),
    )
