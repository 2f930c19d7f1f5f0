"""What the dense decoder families share: rows, config fields, rotary embedding, windows."""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.architecture.traits import Activation
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.rows import GateUp, Ignore, Qkv, Role, Rows, Tied, Vocab, Whole

M = "decoder.layers.{layer}."
H = "model.layers.{layer}."

EMBEDDING = Vocab(
    "embedding.word_embeddings.weight",
    ("model.embed_tokens.weight",),
    ("vocab_size", "hidden_size"),
)

ENDS = (
    EMBEDDING,
    Whole(
        "decoder.final_layernorm.weight",
        ("model.norm.weight",),
        ("hidden_size",),
        role=Role.NORM,
    ),
    Vocab("output_layer.weight", ("lm_head.weight",), ("vocab_size", "hidden_size"), when="!tied"),
    Tied("output_layer.weight", of=EMBEDDING, when="tied"),
    Ignore(
        "lm_head.weight", "a copy of the embedding", when="tied", equals="model.embed_tokens.weight"
    ),
)

NORMS = (
    Whole(
        M + "input_layernorm.weight",
        (H + "input_layernorm.weight",),
        ("hidden_size",),
        role=Role.NORM,
    ),
    Whole(
        M + "pre_mlp_layernorm.weight",
        (H + "post_attention_layernorm.weight",),
        ("hidden_size",),
        role=Role.NORM,
    ),
)

ATTENTION = (
    Qkv(
        M + "self_attention.linear_qkv.weight",
        (
            H + "self_attn.q_proj.weight",
            H + "self_attn.k_proj.weight",
            H + "self_attn.v_proj.weight",
        ),
        ("hidden_size",),
    ),
    Rows(
        M + "self_attention.linear_proj.weight",
        (H + "self_attn.o_proj.weight",),
        ("hidden_size", "query_size"),
    ),
    Ignore(H + "self_attn.rotary_emb.inv_freq", "computed from the config"),
)

MLP = (
    GateUp(
        M + "mlp.linear_fc1.weight",
        (H + "mlp.gate_proj.weight", H + "mlp.up_proj.weight"),
        ("ffn_hidden_size", "hidden_size"),
        when="!experts",
    ),
    Rows(
        M + "mlp.linear_fc2.weight",
        (H + "mlp.down_proj.weight",),
        ("hidden_size", "ffn_hidden_size"),
        when="!experts",
    ),
)

BLOCK = (*NORMS, *ATTENTION, *MLP)

QKV_BIAS = (
    Qkv(
        M + "self_attention.linear_qkv.bias",
        (H + "self_attn.q_proj.bias", H + "self_attn.k_proj.bias", H + "self_attn.v_proj.bias"),
        (),
        when="qkv_bias",
        role=Role.BIAS,
    ),
)

ATTENTION_BIAS = (
    *QKV_BIAS,
    Whole(
        M + "self_attention.linear_proj.bias",
        (H + "self_attn.o_proj.bias",),
        ("hidden_size",),
        when="proj_bias",
        role=Role.BIAS,
    ),
)

LINEAR_BIAS = (
    *ATTENTION_BIAS,
    GateUp(
        M + "mlp.linear_fc1.bias",
        (H + "mlp.gate_proj.bias", H + "mlp.up_proj.bias"),
        ("ffn_hidden_size",),
        when="mlp_bias !experts",
        role=Role.BIAS,
    ),
    Whole(
        M + "mlp.linear_fc2.bias",
        (H + "mlp.down_proj.bias",),
        ("hidden_size",),
        when="mlp_bias !experts",
        role=Role.BIAS,
    ),
)

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

QK_NORM = (
    Whole(
        M + "self_attention.q_layernorm.weight",
        (H + "self_attn.q_norm.weight",),
        ("kv_channels",),
        when="qk_norm",
        role=Role.NORM,
    ),
    Whole(
        M + "self_attention.k_layernorm.weight",
        (H + "self_attn.k_norm.weight",),
        ("kv_channels",),
        when="qk_norm",
        role=Role.NORM,
    ),
)


def architecture(
    fields: Fields,
    *,
    rope: Rope | None = None,
    activation: Activation | None = None,
    epsilon: str = "rms_norm_eps",
    **traits: Any,
) -> Architecture:
    """The architecture from the fields every dense decoder has and the family's own traits.

    Families whose fields have other names or kinds pass `rope` and `activation`; `epsilon` is the
    name of a field; `traits` are further arguments of `Architecture`.
    """
    hidden, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    return Architecture(
        num_layers=fields.take("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=fields.take("num_key_value_heads", heads),
        kv_channels=fields.take("head_dim", hidden // heads),
        ffn_hidden_size=fields.take("intermediate_size"),
        vocab_size=fields.take("vocab_size"),
        max_position_embeddings=fields.take("max_position_embeddings"),
        layernorm_epsilon=fields.take(epsilon),
        rope=rope or take_rope(fields),
        tied=fields.take("tie_word_embeddings"),
        activation=activation or take_activation(fields, "hidden_act"),
        attention_dropout=fields.take("attention_dropout", 0.0),
        **traits,
    )


def take_activation(fields: Fields, name: str) -> Activation:
    """The MLP's activation function from the field of that name."""
    value = fields.take(name)
    if value not in ACTIVATIONS:
        fields.refuse(name, value, f"the MLP's activation can be {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.get(value, Activation.SILU)


def take_windows(fields: Fields) -> tuple[int | None, tuple[bool, ...]]:
    """The architecture's `window` and `windowed`, if each layer either slides or sees
    everything.
    """
    fields.ignore("max_window_layers", "layer_types states it for each layer")
    window = fields.take("sliding_window", None)
    if not fields.take("use_sliding_window", True):
        window = None
    layers = fields.take("layer_types")
    if len(layers) != fields.take("num_hidden_layers"):
        fields.refuse("layer_types", layers, "must name every layer")
    for kind in dict.fromkeys(layers):
        if kind not in ("full_attention", "sliding_attention"):
            fields.refuse("layer_types", kind, "must be full_attention or sliding_attention")
    windowed = tuple(kind == "sliding_attention" for kind in layers)
    if not any(windowed):
        return None, ()
    if window is None:
        fields.refuse(
            "layer_types", "sliding_attention", "needs use_sliding_window and a sliding_window"
        )
        return None, ()
    return window, () if all(windowed) else windowed
