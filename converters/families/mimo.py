"""MiMo: a Qwen2 decoder, and layers for multi-token prediction that are numbered apart.

These take the hidden states before the model's final norm, as in the makers' own code for vLLM; its
inputs are the hidden states, then the embedding.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import qwen2
from megatron_policy.converters.families.shared import dense, mtp
from megatron_policy.converters.rows import Ignore, Row

_NAMES = mtp.Names(
    held="model.mtp_layers.{mtp}.",
    left_out="model.mtp_layers.{left_out}.",
    embedding_norm="token_layernorm.weight",
    hidden_norm="hidden_layernorm.weight",
    projection="input_proj.weight",
    final_norm="final_layernorm.weight",
    hidden_first=True,
)
TABLE: tuple[Row | Ignore, ...] = (
    *qwen2.TABLE,
    *mtp.layers((*dense.BLOCK, *dense.QKV_BIAS), _NAMES),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a MiMoConfig describes."""
    fields.ignore("auto_map", "the makers' own code, which transformers' Qwen2 replaces")
    fields.expect("attention_bias", (True,), "queries, keys and values have biases")
    fields.expect("use_sliding_window", (False,), "the layers that predict have no windows")
    return replace(
        qwen2.architecture(fields), further_layers=mtp.take_layers(fields), mtp_before_norm=True
    )
