"""GLM-4.5 and 4.6: grouped queries, half of each head rotated, and DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, experts, mtp
from megatron_policy.converters.rows import Ignore, Row

_LAYER: tuple[Row | Ignore, ...] = (
    *dense.BLOCK,
    *dense.QKV_BIAS,
    *dense.QK_NORM,
    *experts.routed(),
    experts.CORRECTION_BIAS,
    *experts.shared("shared_experts"),
)
TABLE: tuple[Row | Ignore, ...] = (*dense.ENDS, *_LAYER, *mtp.layers(_LAYER))


def architecture(fields: Fields) -> Architecture:
    """The architecture a Glm4MoeConfig describes."""
    common = dense.architecture(
        fields,
        rope=take_rope(fields, partial=True),
        qkv_bias=fields.take("attention_bias", False),
        qk_norm=QkNorm.PER_HEAD if fields.take("use_qk_norm", False) else QkNorm.NONE,
    )
    common = replace(common, further_layers=mtp.take_layers(fields))
    return experts.with_experts(
        fields, common, experts.take_sigmoid_moe(fields), experts.take_layers_after_dense(fields)
    )
