"""Mixtral: every layer has experts, and the chosen experts' scores are renormalised."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Moe, Scoring
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts
from megatron_policy.converters.rows import Ignore, Row

TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *dense.NORMS,
    *dense.ATTENTION,
    *experts.routed("block_sparse_moe", ("w1", "w3", "w2")),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a MixtralConfig describes."""
    fields.expect("router_jitter_noise", (0.0,), "Megatron-Core has no such noise in training")
    attention = dense.take_attention(fields, window=fields.take("sliding_window", None))
    moe = Moe(
        experts=experts.take_experts(fields, "num_local_experts", "num_experts"),
        chosen=fields.take("num_experts_per_tok"),
        ffn_hidden_size=fields.take("intermediate_size"),
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
    )
    return dense.architecture(fields, attention, experts.place(fields, moe))
