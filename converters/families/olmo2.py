"""OLMo 2: norms after attention and MLP, and QK norm over all heads."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import QkNorm
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
    bias = fields.take("attention_bias", False)
    return dense.architecture(
        fields,
        qkv_bias=bias,
        proj_bias=bias,
        pre_norm=False,
        post_norm=True,
        qk_norm=QkNorm.ALL_HEADS,
    )
