"""EXAONE 4: norms after attention and MLP, QK norm; with windows, only windowed layers rotate."""

from __future__ import annotations

from dataclasses import replace

from megatron_policy.converters.architecture import Architecture, Norms, QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, norm_rows

TABLE = (
    *dense.ENDS,
    *norm_rows.AFTER,
    *dense.ATTENTION,
    *dense.QK_NORM,
    *dense.MLP,
)


def architecture(fields: Fields) -> Architecture:
    """The architecture an Exaone4Config describes."""
    fields.ignore("sliding_window_pattern", "layer_types states it for each layer")
    attention = dense.take_attention(fields, qk_norm=QkNorm.PER_HEAD)
    layers = dense.take_windows(fields, attention)
    # The window's size decides which layers rotate, even where no layer has a window.
    if fields.take("sliding_window", None) is not None:
        unrotated = replace(attention, rope=None)
        layers = [unrotated if layer.window is None else layer for layer in layers]
    unused = None if any(layer.rope for layer in layers) else attention.rope
    return dense.architecture(fields, layers, norms=Norms.AFTER, unused_rope=unused)
