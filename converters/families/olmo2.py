"""OLMo 2: norms after attention and MLP, and QK norm over all heads."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Attention, Norms, QkNorm, Rope
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, norm_rows

TABLE = (
    *dense.ENDS,
    *norm_rows.AFTER,
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    *norm_rows.ALL_HEADS,
    *dense.MLP,
)


def architecture(fields: Fields) -> Architecture:
    """The architecture an Olmo2Config describes."""
    return dense.architecture(fields, take_attention(fields), norms=Norms.AFTER)


def take_attention(fields: Fields, rope: Rope | None = None) -> Attention:
    """OLMo's attention."""
    bias = fields.take("attention_bias", False)
    return dense.take_attention(fields, rope=rope, bias=bias, qk_norm=QkNorm.ALL_HEADS)
