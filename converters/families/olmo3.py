"""OLMo 3: OLMo 2 with a window on most layers, which have a rotary embedding of their own."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_ropes_by_window
from megatron_policy.converters.families.shared import dense

from . import olmo2

TABLE = olmo2.TABLE


def architecture(fields: Fields) -> Architecture:
    """The architecture an Olmo3Config describes."""
    bias = fields.take("attention_bias", False)
    window, windowed = dense.take_windows(fields)
    whole, of_windowed = take_ropes_by_window(fields, base_of_windowed="rope_theta")
    return dense.architecture(
        fields,
        rope=whole,
        window_rope=of_windowed if window else None,
        window=window,
        windowed=windowed,
        qkv_bias=bias,
        proj_bias=bias,
        pre_norm=False,
        post_norm=True,
        qk_norm=QkNorm.ALL_HEADS,
    )
