"""MiniMax M2: experts chosen by corrected sigmoid scores, queries and keys normalised over all
heads, part of each head rotated.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Moe, QkNorm, Scoring
from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, experts, norm_rows
from megatron_policy.converters.rows import Ignore, Row

_BLOCK = "block_sparse_moe"
TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *dense.NORMS,
    *dense.ATTENTION,
    *norm_rows.ALL_HEADS,
    *experts.routed(_BLOCK, ("w1", "w3", "w2")),
    experts.correction_bias(f"{_BLOCK}.e_score_correction_bias"),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a MiniMaxM2Config describes."""
    fields.ignore("auto_map", "the makers' own code, which transformers replaces")
    for name in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
        fields.ignore(name, "of layers that the model's logits do not need")
    fields.expect("router_jitter_noise", (0.0,), "Megatron-Core has no such noise in training")
    fields.expect("scoring_func", ("sigmoid",), "scores are sigmoids of the router's logits")
    fields.expect("use_routing_bias", (True,), "experts are chosen by corrected scores")
    fields.expect("use_qk_norm", (True,), "queries and keys are normalised")
    fields.expect("qk_norm_type", ("per_layer",), "one norm spans all heads")
    fields.expect("shared_intermediate_size", (0,), "there is no shared expert")
    kinds = fields.take("attn_type_list", None) or ()
    if any(kind != 1 for kind in kinds):
        fields.refuse("attn_type_list", kinds, "every layer has full attention, which is 1")
    moe = Moe(
        experts=experts.take_experts(fields, "num_local_experts", "num_experts"),
        chosen=fields.take("num_experts_per_tok"),
        ffn_hidden_size=fields.take("intermediate_size"),
        scoring=Scoring.SIGMOID,
        renormalized=True,
        correction_bias=True,
    )
    attention = dense.take_attention(fields, rope=_take_rope(fields), qk_norm=QkNorm.ALL_HEADS)
    return dense.architecture(fields, attention, experts.place(fields, moe))


def _take_rope(fields: Fields) -> Rope:
    """The rotated part is `partial_rotary_factor` of a head or, in published configs, `rotary_dim`
    channels, which releases of transformers that ignore that field write back unchanged.
    """
    rotated, head = fields.take("rotary_dim", None), fields.take("head_dim")
    if rotated is None:
        return take_rope(fields, partial=True)
    if not isinstance(rotated, int) or not 2 <= rotated <= head:
        fields.refuse("rotary_dim", rotated, f"must be a number of channels from 2 to {head}")
        return take_rope(fields, partial=True)
    rope = take_rope(fields, partial=True, fraction=rotated / head)
    if rope.size(head) != rotated:
        fields.refuse("rotary_dim", rotated, "contradicts partial_rotary_factor")
    return rope
