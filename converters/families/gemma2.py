"""Gemma 2: softcaps, norms before and after attention and MLP, a window on every other layer."""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import Architecture, Attention, Norm, Norms
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
    softcap = fields.take("attn_logit_softcapping", None)
    attention = take_attention(fields, attention_softcap=softcap)
    return describe(fields, dense.take_windows(fields, attention))


def take_attention(fields: Fields, **traits: Any) -> Attention:
    """Gemma's attention, with further `traits`."""
    bias = fields.take("attention_bias", False)
    scale = fields.take("query_pre_attn_scalar") ** -0.5
    return dense.take_attention(fields, bias=bias, attention_scale=scale, **traits)


def describe(fields: Fields, attention: list[Attention], **traits: Any) -> Architecture:
    """The architecture with the attention of each layer, and further `traits`."""
    fields.expect("use_bidirectional_attention", (False,), "attention is causal")
    fields.ignore("cache_implementation", "how Hugging Face generates")
    fields.ignore("hidden_act", "hidden_activation takes precedence")
    return dense.architecture(
        fields,
        attention,
        dense.take_mlp(fields, activation=dense.take_activation(fields, "hidden_activation")),
        norms=Norms.AROUND,
        norm=Norm.RMS_PLUS_ONE,
        embedding_scale=fields.take("hidden_size") ** 0.5,
        logit_softcap=fields.take("final_logit_softcapping", None),
        **traits,
    )
