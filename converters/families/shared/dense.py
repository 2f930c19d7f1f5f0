"""What the dense decoder families share: rows, config fields, rotary embedding, windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from megatron_policy.converters.architecture import (
    Activation,
    Architecture,
    Attention,
    Beside,
    Feed,
    Mixer,
    Mlp,
    Norms,
    Rope,
    stack,
)
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.rows import (
    Columns,
    GateUp,
    Ignore,
    Qkv,
    Role,
    Row,
    RowBase,
    Rows,
    Tied,
    Vocab,
    Whole,
    assign_part,
)

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

ATTENTION: tuple[Row | Ignore, ...] = (
    *assign_part(
        Attention,
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
    ),
    Ignore(H + "self_attn.rotary_emb.inv_freq", "computed from the config"),
)

MLP = assign_part(
    Mlp,
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
)


def ungated_mlp(up: str, down: str, *, biases: bool = False) -> tuple[RowBase, ...]:
    """Rows of an MLP without a gate, whose projections HF calls `up` and `down`; `biases` says
    whether models of the family can have some.
    """
    first, last = M + "mlp.linear_fc1.", M + "mlp.linear_fc2."
    up, down = f"{H}mlp.{up}.", f"{H}mlp.{down}."
    bias: dict[str, Any] = {"when": "mlp_bias", "role": Role.BIAS}
    return assign_part(
        Mlp,
        Columns(first + "weight", (up + "weight",), ("ffn_hidden_size", "hidden_size")),
        *biases * (Columns(first + "bias", (up + "bias",), ("ffn_hidden_size",), **bias),),
        Rows(last + "weight", (down + "weight",), ("hidden_size", "ffn_hidden_size")),
        *biases * (Whole(last + "bias", (down + "bias",), ("hidden_size",), **bias),),
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
        part=Attention,
        when="proj_bias",
        role=Role.BIAS,
    ),
)

LINEAR_BIAS = (
    *ATTENTION_BIAS,
    *assign_part(
        Mlp,
        GateUp(
            M + "mlp.linear_fc1.bias",
            (H + "mlp.gate_proj.bias", H + "mlp.up_proj.bias"),
            ("ffn_hidden_size",),
            when="mlp_bias",
            role=Role.BIAS,
        ),
        Whole(
            M + "mlp.linear_fc2.bias",
            (H + "mlp.down_proj.bias",),
            ("hidden_size",),
            when="mlp_bias",
            role=Role.BIAS,
        ),
    ),
)

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

QK_NORM = assign_part(
    Attention,
    *(
        Whole(
            f"{M}self_attention.{name}_layernorm.weight",
            (f"{H}self_attn.{name}_norm.weight",),
            ("kv_channels",),
            when="qk_norm",
            role=Role.NORM,
        )
        for name in "qk"
    ),
)


def rename(rows: Iterable[Row | Ignore], names: Mapping[str, str]) -> tuple[Row | Ignore, ...]:
    """The same rows where HF has other names: `names` has what takes the place of parts of them."""

    def new(name: str) -> str:
        for part, other in names.items():
            name = name.replace(part, other)
        return name

    def renamed(row: Row | Ignore) -> Row | Ignore:
        if isinstance(row, Ignore):
            return replace(row, hf=new(row.hf), equals=new(row.equals))
        if isinstance(row, Tied):
            return replace(row, of=replace(row.of, hf=tuple(map(new, row.of.hf))))
        return cast(Row, replace(cast(RowBase, row), hf=tuple(map(new, row.hf))))

    return tuple(map(renamed, rows))


def architecture(
    fields: Fields,
    mixer: Mixer | Sequence[Mixer | None] | None = None,
    feed: Feed | Sequence[Feed | None] | None = None,
    *,
    norms: Norms | Sequence[Norms] = Norms.BEFORE,
    beside: Beside | None = None,
    epsilon: str = "rms_norm_eps",
    **traits: Any,
) -> Architecture:
    """The architecture from the fields every decoder has, the parts of its layers and traits.

    A part is one for all layers, or there is one for each: by default `take_attention(fields)` and
    `take_mlp(fields)`. `epsilon` is the name of a field; `traits` are further arguments of
    `Architecture`.
    """
    number = fields.take("num_hidden_layers")
    layers = stack(
        number,
        take_attention(fields) if mixer is None else mixer,
        take_mlp(fields) if feed is None else feed,
        norms,
        beside,
    )
    dense = any(isinstance(layer.feed, Mlp) for layer in layers)
    return Architecture(
        layers=layers,
        hidden_size=fields.take("hidden_size"),
        vocab_size=fields.take("vocab_size"),
        max_position_embeddings=fields.take("max_position_embeddings"),
        layernorm_epsilon=fields.take(epsilon),
        tied=fields.take("tie_word_embeddings"),
        unused_ffn_hidden_size=0 if dense else fields.take("intermediate_size", 0),
        **traits,
    )


def take_attention(
    fields: Fields, *, rope: Rope | None = None, bias: bool = False, **traits: Any
) -> Attention:
    """The attention of all layers, with its own `rope`, with `bias` on all four projections, and
    with `traits` of `Attention`.
    """
    hidden, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    return Attention(
        num_attention_heads=heads,
        num_query_groups=fields.take("num_key_value_heads", heads),
        kv_channels=fields.take("head_dim", hidden // heads),
        rope=rope or take_rope(fields),
        attention_dropout=fields.take("attention_dropout", 0.0),
        **{"qkv_bias": bias, "proj_bias": bias} | traits,
    )


def take_mlp(fields: Fields, *, activation: Activation | None = None, **traits: Any) -> Mlp:
    """The MLP of dense layers, with its own `activation` and `traits` of `Mlp`."""
    return Mlp(
        ffn_hidden_size=fields.take("intermediate_size"),
        activation=activation or take_activation(fields, "hidden_act"),
        **traits,
    )


def take_activation(fields: Fields, name: str) -> Activation:
    """The MLP's activation function from the field of that name."""
    value = fields.take(name)
    if value not in ACTIVATIONS:
        fields.refuse(name, value, f"the MLP's activation can be {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.get(value, Activation.SILU)


def take_windows(fields: Fields, attention: Attention, rope: Rope | None = None) -> list[Attention]:
    """The attention of each layer, which either has the window, and its own `rope` if there is one,
    or sees everything.
    """
    fields.ignore("max_window_layers", "layer_types states it for each layer")
    window = fields.take("sliding_window", None)
    if not fields.take("use_sliding_window", True):
        window = None
    layers = fields.take("layer_types")
    if len(layers) != fields.take("num_hidden_layers"):
        fields.refuse("layer_types", layers, "must name every layer")
        return [attention] * fields.take("num_hidden_layers")
    for kind in dict.fromkeys(layers):
        if kind not in ("full_attention", "sliding_attention"):
            fields.refuse("layer_types", kind, "must be full_attention or sliding_attention")
    if window is None and "sliding_attention" in layers:
        fields.refuse(
            "layer_types", "sliding_attention", "needs use_sliding_window and a sliding_window"
        )
    narrow = attention
    if window is not None:
        narrow = replace(attention, window=window, rope=rope or attention.rope)
    return [narrow if kind == "sliding_attention" else attention for kind in layers]


def state_ropes(layers: Sequence[Attention], whole: Rope, of_windowed: Rope) -> dict[str, Any]:
    """What `Architecture` says of rotary embeddings beside the layers: the config has one for
    layers without a window and one for those with it.
    """
    windowed = [layer.window is not None for layer in layers]
    stated = {"window_rope": of_windowed} if any(windowed) else {}
    return stated | ({"unused_rope": whole} if all(windowed) else {})
