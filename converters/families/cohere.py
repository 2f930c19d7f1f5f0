"""Cohere's Command R and R+: parallel attention and MLP, layer norms without bias."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Norm, Norms, QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, norm_rows

TABLE = (
    *dense.ENDS,
    *norm_rows.ONE,
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    *norm_rows.EACH_HEAD,
    *dense.MLP,
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a CohereConfig describes."""
    fields.ignore("pretraining_tp", "only the order of summation in pretraining")
    bias = fields.take("attention_bias", False)
    attention = dense.take_attention(
        fields,
        rope=take_rope(fields, interleaved=True),
        bias=bias,
        qk_norm=QkNorm.EACH_HEAD if fields.take("use_qk_norm", False) else QkNorm.NONE,
    )
    return dense.architecture(
        fields,
        attention,
        norms=Norms.ONE,
        epsilon="layer_norm_eps",
        norm=Norm.LAYER,
        logit_scale=float(fields.take("logit_scale", 1.0)),
    )
