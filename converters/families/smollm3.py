"""SmolLM3: some layers have no rotary embedding, and some may have a window."""

from __future__ import annotations

from dataclasses import replace

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense

TABLE = (*dense.ENDS, *dense.BLOCK, *dense.LINEAR_BIAS)


def architecture(fields: Fields) -> Architecture:
    """The architecture a SmolLM3Config describes."""
    fields.ignore("no_rope_layer_interval", "no_rope_layers states it for each layer")
    fields.ignore("pretraining_tp", "only the order of summation in pretraining")
    # Despite its name, the field has a 1 for layers with rotary embedding.
    rotated = fields.take("no_rope_layers")[: fields.take("num_hidden_layers")]
    if len(rotated) < fields.take("num_hidden_layers"):
        fields.refuse("no_rope_layers", rotated, "must name every layer")
    attention = dense.take_attention(fields, bias=fields.take("attention_bias", False))
    layers = zip(dense.take_windows(fields, attention), rotated, strict=False)
    return dense.architecture(
        fields,
        [layer if turns else replace(layer, rope=None) for layer, turns in layers],
        dense.take_mlp(fields, mlp_bias=fields.take("mlp_bias", False)),
    )
