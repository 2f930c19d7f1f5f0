"""Seed-OSS: llama with separate switches for the biases before and after attention, and dropout of
what attention and MLP add.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense

TABLE = (*dense.ENDS, *dense.BLOCK, *dense.LINEAR_BIAS)


def architecture(fields: Fields) -> Architecture:
    """The architecture a SeedOssConfig describes."""
    fields.ignore("pretraining_tp", "only the order of summation in pretraining")
    qkv_bias = fields.take("attention_bias", False)
    proj_bias = fields.take("attention_out_bias", False)
    if proj_bias and not qkv_bias:
        fields.refuse("attention_out_bias", True, "Megatron-Core has it only with attention_bias")
    return dense.architecture(
        fields,
        dense.take_attention(fields, qkv_bias=qkv_bias, proj_bias=proj_bias),
        dense.take_mlp(fields, mlp_bias=fields.take("mlp_bias", False)),
        hidden_dropout=fields.take("residual_dropout", 0.0),
    )
