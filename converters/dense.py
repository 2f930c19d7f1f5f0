"""What the dense decoder families share: rows, config fields, rotary embedding, windows.

Knows no single family: each picks its rows and says which fields it has.
"""

from __future__ import annotations

from .architecture import Architecture
from .config_fields import Fields
from .rotary import Llama3Scaling, Rope
from .rows import GateUp, Ignore, Qkv, Rows, Tied, Vocab, Whole
from .traits import QkNorm

M = "decoder.layers.{layer}."
H = "model.layers.{layer}."

EMBEDDING = Vocab(
    "embedding.word_embeddings.weight",
    ("model.embed_tokens.weight",),
    ("vocab_size", "hidden_size"),
)

ENDS = (
    EMBEDDING,
    Whole("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden_size",)),
    Vocab("output_layer.weight", ("lm_head.weight",), ("vocab_size", "hidden_size"), when="!tied"),
    Tied("output_layer.weight", of=EMBEDDING, when="tied"),
    Ignore(
        "lm_head.weight", "a copy of the embedding", when="tied", equals="model.embed_tokens.weight"
    ),
)

BLOCK = (
    Whole(M + "input_layernorm.weight", (H + "input_layernorm.weight",), ("hidden_size",)),
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
    Whole(
        M + "pre_mlp_layernorm.weight", (H + "post_attention_layernorm.weight",), ("hidden_size",)
    ),
    GateUp(
        M + "mlp.linear_fc1.weight",
        (H + "mlp.gate_proj.weight", H + "mlp.up_proj.weight"),
        ("ffn_hidden_size", "hidden_size"),
    ),
    Rows(
        M + "mlp.linear_fc2.weight",
        (H + "mlp.down_proj.weight",),
        ("hidden_size", "ffn_hidden_size"),
    ),
    Ignore(H + "self_attn.rotary_emb.inv_freq", "computed from the config"),
)

QKV_BIAS = (
    Qkv(
        M + "self_attention.linear_qkv.bias",
        (H + "self_attn.q_proj.bias", H + "self_attn.k_proj.bias", H + "self_attn.v_proj.bias"),
        (),
        when="qkv_bias",
    ),
)

LINEAR_BIAS = (
    *QKV_BIAS,
    Whole(
        M + "self_attention.linear_proj.bias",
        (H + "self_attn.o_proj.bias",),
        ("hidden_size",),
        when="add_bias_linear",
    ),
    GateUp(
        M + "mlp.linear_fc1.bias",
        (H + "mlp.gate_proj.bias", H + "mlp.up_proj.bias"),
        ("ffn_hidden_size",),
        when="add_bias_linear",
    ),
    Whole(
        M + "mlp.linear_fc2.bias",
        (H + "mlp.down_proj.bias",),
        ("hidden_size",),
        when="add_bias_linear",
    ),
)

QK_NORM = (
    Whole(
        M + "self_attention.q_layernorm.weight", (H + "self_attn.q_norm.weight",), ("kv_channels",)
    ),
    Whole(
        M + "self_attention.k_layernorm.weight", (H + "self_attn.k_norm.weight",), ("kv_channels",)
    ),
)


def architecture(
    fields: Fields,
    *,
    add_qkv_bias: bool = False,
    add_bias_linear: bool = False,
    qk_norm: QkNorm = QkNorm.NONE,
    window: int | None = None,
    windowed: tuple[bool, ...] = (),
) -> Architecture:
    """The architecture from the fields every dense decoder has and the family's own traits."""
    fields.expect("hidden_act", ("silu", "swish"), "the MLP is SwiGLU")
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
        layernorm_epsilon=fields.take("rms_norm_eps"),
        rope=take_rope(fields),
        tied=fields.take("tie_word_embeddings"),
        add_qkv_bias=add_qkv_bias,
        add_bias_linear=add_bias_linear,
        qk_norm=qk_norm,
        window=window,
        windowed=windowed,
        attention_dropout=fields.take("attention_dropout", 0.0),
    )


def take_rope(fields: Fields) -> Rope:
    """Rotary embedding in both spellings: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    fields.expect("partial_rotary_factor", (1.0,), "the whole head is rotated")
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    if section is None:
        return Rope(float(fields.take("rope_theta")))
    # A release that only knows rope_theta adds its default for it beside the rope_parameters.
    base = float(section.take("rope_theta", None) or fields.take("rope_theta"))
    fields.ignore("rope_theta", "rope_parameters has the last word")
    section.expect("partial_rotary_factor", (1.0,), "the whole head is rotated")
    kind = section.take("rope_type", section.take("type", "default"))
    if kind == "default":
        return Rope(base)
    if kind != "llama3":
        section.refuse("rope_type", kind, "frequencies can be 'default' or scaled by 'llama3'")
        return Rope(base)
    return Rope(
        base,
        Llama3Scaling(
            factor=section.take("factor"),
            low_freq_factor=section.take("low_freq_factor"),
            high_freq_factor=section.take("high_freq_factor"),
            original_max_position=section.take("original_max_position_embeddings"),
        ),
    )


def take_windows(fields: Fields) -> tuple[int | None, tuple[bool, ...]]:
    """The architecture's `window` and `windowed`, where each layer slides or sees everything."""
    fields.ignore("max_window_layers", "layer_types says it layer by layer")
    window = (
        fields.take("sliding_window", None) if fields.take("use_sliding_window", False) else None
    )
    layers = fields.take("layer_types")
    if len(layers) != fields.take("num_hidden_layers"):
        fields.refuse("layer_types", layers, "must name every layer")
    for kind in dict.fromkeys(layers):
        if kind not in ("full_attention", "sliding_attention"):
            fields.refuse("layer_types", kind, "layers are of full_attention or sliding_attention")
    windowed = tuple(kind == "sliding_attention" for kind in layers)
    if not any(windowed):
        return None, ()
    if window is None:
        fields.refuse(
            "layer_types", "sliding_attention", "needs use_sliding_window and a sliding_window"
        )
        return None, ()
    return window, () if all(windowed) else windowed
