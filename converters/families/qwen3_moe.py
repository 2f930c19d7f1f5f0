"""Qwen3-MoE: Qwen3 with experts on all layers, or on some."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts
from megatron_policy.converters.rows import Ignore, Row

TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *dense.BLOCK,
    *dense.ATTENTION_BIAS,
    *dense.QK_NORM,
    *experts.routed(),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3MoeConfig describes."""
    windowed = fields.take("use_sliding_window", False)
    window = fields.take("sliding_window", None)
    fields.ignore("max_window_layers", "all layers have the window, or none")
    bias = fields.take("attention_bias", False)
    attention = dense.take_attention(
        fields,
        bias=bias,
        qk_norm=QkNorm.PER_HEAD,
        window=window if windowed else None,
    )
    moe, layers = experts.take_softmax_moe(fields), experts.take_sparse_layers(fields)
    return dense.architecture(fields, attention, experts.place(fields, moe, layers))
