"""EXAONE 4: norms after attention and MLP, QK norm; with windows, only windowed layers rotate."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import QkNorm
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
    window, windowed = dense.take_windows(fields)
    # The window's size decides which layers rotate, even where no layer has a window.
    has_size = fields.take("sliding_window", None) is not None
    unrotated = tuple(kind != "sliding_attention" for kind in fields.take("layer_types"))
    return dense.architecture(
        fields,
        window=window,
        windowed=windowed,
        without_rope=unrotated if has_size and any(unrotated) else (),
        pre_norm=False,
        post_norm=True,
        qk_norm=QkNorm.PER_HEAD,
    )
