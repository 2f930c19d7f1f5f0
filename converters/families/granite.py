"""Granite 3 (dense): factors on embeddings, attention, residual sums and logits."""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import Architecture, Attention
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense

TABLE = (*dense.ENDS, *dense.BLOCK, *dense.LINEAR_BIAS)


def architecture(fields: Fields) -> Architecture:
    """The architecture a GraniteConfig describes."""
    return dense.architecture(
        fields,
        take_attention(fields),
        dense.take_mlp(fields, mlp_bias=fields.take("mlp_bias", False)),
        **take_factors(fields),
    )


def take_attention(fields: Fields) -> Attention:
    """Attention whose scores have a factor of the config."""
    bias, scale = fields.take("attention_bias", False), fields.take("attention_multiplier")
    return dense.take_attention(fields, bias=bias, attention_scale=float(scale))


def take_factors(fields: Fields) -> dict[str, Any]:
    """The factors on embeddings, residual sums and logits."""
    return {
        "embedding_scale": float(fields.take("embedding_multiplier")),
        "residual_scale": float(fields.take("residual_multiplier")),
        "logit_scale": 1.0 / fields.take("logits_scaling"),
    }
