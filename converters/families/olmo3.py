"""OLMo 3: OLMo 2 with a window on most layers, which have a rotary embedding of their own."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Norms
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_ropes_by_window
from megatron_policy.converters.families.shared import dense

from . import olmo2

TABLE = olmo2.TABLE


def architecture(fields: Fields) -> Architecture:
    """The architecture an Olmo3Config describes."""
    whole, of_windowed = take_ropes_by_window(fields, base_of_windowed="rope_theta")
    layers = dense.take_windows(fields, olmo2.take_attention(fields, whole), of_windowed)
    stated = dense.state_ropes(layers, whole, of_windowed)
    return dense.architecture(fields, layers, norms=Norms.AFTER, **stated)
