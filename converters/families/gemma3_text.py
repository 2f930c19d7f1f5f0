"""Gemma 3 (text): Gemma 2 with QK norm, and a separate rotary base for windowed layers."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_ropes_by_window
from megatron_policy.converters.families.shared import dense, norm_rows

from . import gemma2

TABLE = (
    *dense.ENDS,
    *norm_rows.AROUND,
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    *dense.QK_NORM,
    *dense.MLP,
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Gemma3TextConfig describes."""
    if cap := fields.take("attn_logit_softcapping", None):
        fields.refuse("attn_logit_softcapping", cap, "transformers does not apply it in Gemma 3")
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        fields.ignore(name, "layer_types states it for each layer")
    whole, of_windowed = take_ropes_by_window(fields)
    attention = gemma2.take_attention(fields, rope=whole, qk_norm=QkNorm.PER_HEAD)
    layers = dense.take_windows(fields, attention, of_windowed)
    return gemma2.describe(fields, layers, **dense.state_ropes(layers, whole, of_windowed))
