"""LFM2: gated short convolutions, and attention with norms of queries and keys on some layers."""

from __future__ import annotations

from dataclasses import replace

from megatron_policy.converters.architecture import (
    Activation,
    Architecture,
    Mixer,
    Mlp,
    QkNorm,
    ShortConvolution,
)
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, recurrences
from megatron_policy.converters.rows import Ignore, Row

_NAMES = {
    "model.norm.": "model.embedding_norm.",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
TABLE: tuple[Row | Ignore, ...] = (
    *dense.rename((*dense.ENDS, *dense.BLOCK, *dense.QK_NORM), _NAMES),
    *recurrences.rows_of_short_convolution("conv"),
)
_INITIAL = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")
_SAME_AS = {
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
    "block_norm_eps": "norm_eps",
}
"""What published files say twice."""


def architecture(fields: Fields) -> Architecture:
    """The architecture an Lfm2Config describes."""
    for name, other in _SAME_AS.items():
        fields.expect(name, (fields.take(other),), f"repeats {other}")
    fields.expect("block_use_swiglu", (True,), "the MLP is gated")
    fields.expect("use_pos_enc", (True,), "attention has a rotary embedding")
    fields.expect("hidden_act", ("silu", "swish"), "the MLP's activation is SiLU")
    fields.expect("attention_dropout", (0, 0.0), "transformers has no dropout in LFM2")
    for name in (*_INITIAL, "conv_use_xavier_init"):
        fields.ignore(name, "weights are loaded, never initialised at random")
    fields.ignore("full_attn_idxs", "layer_types states it for each layer")
    fields.ignore("block_ff_dim", "intermediate_size has its value")
    return dense.architecture(fields, take_mixers(fields), _take_mlp(fields), epsilon="norm_eps")


def take_mixers(fields: Fields) -> list[Mixer]:
    """The mixer of each layer."""
    fields.ignore("tie_embedding", "tie_word_embeddings has its value")
    attention = dense.take_attention(fields, qk_norm=QkNorm.PER_HEAD)
    convolution = ShortConvolution(
        channels=fields.take("hidden_size"),
        taps=fields.take("conv_L_cache"),
        bias=fields.take("conv_bias"),
    )
    kinds: dict[str, Mixer] = {"full_attention": attention, "conv": convolution}
    return recurrences.take_layers(fields, "layer_types", kinds)


def _take_mlp(fields: Fields) -> Mlp:
    """The MLP, whose width the config names before it is reduced to two thirds and rounded up."""
    mlp = dense.take_mlp(fields, activation=Activation.SILU)
    factor = fields.take("block_ffn_dim_multiplier", None)
    step = fields.take("block_multiple_of")
    if not fields.take("block_auto_adjust_ff_dim"):
        return mlp
    width = int(2 * mlp.ffn_hidden_size / 3)
    if factor is not None:
        width = step * -(-int(factor * width) // step)
    return replace(mlp, ffn_hidden_size=width)
