"""Qwen2 and Qwen2.5: biases on query, key and value; some layers may have a window."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense

TABLE = (*dense.ENDS, *dense.BLOCK, *dense.QKV_BIAS)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen2Config describes."""
    fields.expect("use_mrope", (False,), "positions are of text only")
    attention = dense.take_attention(fields, qkv_bias=True)
    return dense.architecture(fields, dense.take_windows(fields, attention))
