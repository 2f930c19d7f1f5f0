"""ERNIE 4.5 (dense): llama with heads rotated in pairs of neighbours, and a bias on every linear
layer or on none.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense

TABLE = (*dense.ENDS, *dense.BLOCK, *dense.LINEAR_BIAS)


def architecture(fields: Fields) -> Architecture:
    """The architecture an Ernie4_5Config describes."""
    fields.expect("attention_dropout", (0.0,), "transformers has no dropout in ERNIE 4.5")
    rope, bias = take_rope(fields, interleaved=True), fields.take("use_bias", False)
    return dense.architecture(
        fields,
        dense.take_attention(fields, rope=rope, bias=bias),
        dense.take_mlp(fields, mlp_bias=bias),
    )
