"""Qwen3 (dense): QK norm per head; some layers may have a window."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense

TABLE = (*dense.ENDS, *dense.BLOCK, *dense.ATTENTION_BIAS, *dense.QK_NORM)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3Config describes."""
    bias = fields.take("attention_bias", False)
    attention = dense.take_attention(fields, bias=bias, qk_norm=QkNorm.PER_HEAD)
    return dense.architecture(fields, dense.take_windows(fields, attention))
