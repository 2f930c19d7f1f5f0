"""Gemma 2: softcaps, norms before and after attention and MLP, a window on every other layer."""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import Activation, Norm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, norm_rows

TABLE = (
    *dense.ENDS,
    *norm_rows.AROUND,
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    *dense.MLP,
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Gemma2Config describes."""
    window, windowed = dense.take_windows(fields)
    return dense.architecture(
        fields,
        activation=take_activation(fields),
        window=window,
        windowed=windowed,
        attention_softcap=fields.take("attn_logit_softcapping", None),
        **shared_traits(fields),
    )


def take_activation(fields: Fields) -> Activation:
    """The MLP's activation function, which Gemma's configs name twice."""
    fields.ignore("hidden_act", "hidden_activation takes precedence")
    return dense.take_activation(fields, "hidden_activation")


def shared_traits(fields: Fields) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common and no other family has."""
    fields.expect("use_bidirectional_attention", (False,), "attention is causal")
    fields.ignore("cache_implementation", "how Hugging Face generates")
    bias = fields.take("attention_bias", False)
    return {
        "qkv_bias": bias,
        "proj_bias": bias,
        "norm": Norm.RMS_PLUS_ONE,
        "post_norm": True,
        "attention_scale": fields.take("query_pre_attn_scalar") ** -0.5,
        "embedding_scale": fields.take("hidden_size") ** 0.5,
        "logit_softcap": fields.take("final_logit_softcapping", None),
    }
