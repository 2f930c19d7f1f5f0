"""Mistral (dense): no biases; either every layer has the window or none."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense

TABLE = (*dense.ENDS, *dense.BLOCK)


def architecture(fields: Fields) -> Architecture:
    """The architecture a MistralConfig describes."""
    window = fields.take("sliding_window", None)
    return dense.architecture(fields, dense.take_attention(fields, window=window))
