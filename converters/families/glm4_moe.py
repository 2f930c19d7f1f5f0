"""GLM-4.5 and 4.6: grouped queries, half of each head rotated, and DeepSeek-V3's experts."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Feed, QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, experts, mtp
from megatron_policy.converters.rows import Ignore, Row

LAYER: tuple[Row | Ignore, ...] = (
    *dense.BLOCK,
    *dense.QKV_BIAS,
    *dense.QK_NORM,
    *experts.routed(),
    experts.CORRECTION_BIAS,
    *experts.shared("shared_experts"),
)
TABLE: tuple[Row | Ignore, ...] = (*dense.ENDS, *LAYER, *mtp.layers(LAYER))


def architecture(fields: Fields) -> Architecture:
    """The architecture a Glm4MoeConfig describes."""
    attention = dense.take_attention(
        fields,
        rope=take_rope(fields, partial=True),
        qkv_bias=fields.take("attention_bias", False),
        qk_norm=QkNorm.PER_HEAD if fields.take("use_qk_norm", False) else QkNorm.NONE,
    )
    return dense.architecture(
        fields, attention, take_feed(fields), further_layers=mtp.take_layers(fields)
    )


def take_feed(fields: Fields) -> Feed | list[Feed]:
    """What a token passes through in each layer: an MLP in the first ones, then experts."""
    moe, layers = experts.take_sigmoid_moe(fields), experts.take_layers_after_dense(fields)
    return experts.place(fields, moe, layers)
