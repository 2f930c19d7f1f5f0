"""OLMoE: softmax-scored experts in every layer, queries and keys normalised over all heads."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts, norm_rows
from megatron_policy.converters.rows import Ignore, Row

from . import olmo2

TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *dense.NORMS,
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    *norm_rows.ALL_HEADS,
    *experts.routed(),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture an OlmoeConfig describes."""
    if (limit := fields.take("clip_qkv", None)) is not None:
        fields.refuse("clip_qkv", limit, "queries, keys and values are not clipped")
    moe = experts.take_softmax_moe(fields, width="intermediate_size")
    return dense.architecture(fields, olmo2.take_attention(fields), experts.place(fields, moe))
