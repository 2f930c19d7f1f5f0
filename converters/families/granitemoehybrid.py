"""Granite 4: Mamba2 with one group, attention with or without a rotary embedding, an MLP or experts
with a shared one, and factors on embeddings, attention, residual sums and logits.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import (
    Architecture,
    Attention,
    Feed,
    Mamba2,
    Mixer,
    Mlp,
    Moe,
)
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families import granite, granitemoe
from megatron_policy.converters.families.shared import dense, experts, recurrences
from megatron_policy.converters.families.shared.dense import H
from megatron_policy.converters.rows import GateUp, Ignore, Joined, Row, Rows

from .granitemoe import PATHS as PATHS

_SHARED_IN, _SHARED_OUT = (f"{H}shared_mlp.{name}_linear.weight" for name in ("input", "output"))
TABLE: tuple[Row | Ignore, ...] = (
    *granitemoe.ATTENTION,
    *recurrences.rows_of_mamba2("mamba"),
    *(
        Joined((_SHARED_IN,), row) if isinstance(row, GateUp) else row
        for row in dense.rename(dense.MLP, {H + "mlp.down_proj.weight": _SHARED_OUT})
    ),
    *granitemoe.EXPERTS,
    Rows(
        experts.SHARED + "linear_fc2.weight",
        (_SHARED_OUT,),
        ("hidden_size", "shared_ffn_hidden_size"),
        part=Moe,
    ),
    Joined(
        (_SHARED_IN,),
        GateUp(
            experts.SHARED + "linear_fc1.weight",
            ("gate", "up"),
            ("shared_ffn_hidden_size", "hidden_size"),
            part=Moe,
        ),
    ),
)
_INITIAL = ("init_method", "mamba_chunk_size", "normalization_function")


def architecture(fields: Fields) -> Architecture:
    """The architecture a GraniteMoeHybridConfig describes."""
    for name in _INITIAL:
        fields.ignore(name, "other fields say it, or it only affects rounding")
    kind, hidden = fields.take("position_embedding_type", None), fields.take("hidden_size")
    fields.expect("position_embedding_type", ("rope", "nope"), "heads are rotated, or not")
    if kind != "rope":
        for name in ("rope_theta", "rope_scaling", "rope_parameters"):
            fields.ignore(name, "no layer has a rotary embedding")
    heads, bias = fields.take("num_attention_heads"), fields.take("attention_bias", False)
    fields.expect("hidden_act", ("silu", "swish"), "Mamba2 and its gate have it")
    mamba_heads, head_dim = fields.take("mamba_n_heads"), fields.take("mamba_d_head", "auto")
    inner = fields.take("mamba_expand", 2) * hidden
    kinds: dict[str, Mixer] = {
        "full_attention": Attention(
            num_attention_heads=heads,
            num_query_groups=fields.take("num_key_value_heads", heads),
            kv_channels=fields.take("head_dim", hidden // heads),
            rope=take_rope(fields) if kind == "rope" else None,
            qkv_bias=bias,
            proj_bias=bias,
            attention_dropout=fields.take("attention_dropout", 0.0),
            attention_scale=float(fields.take("attention_multiplier")),
        ),
        "linear_attention": Mamba2(
            num_heads=mamba_heads,
            head_dim=inner // mamba_heads if head_dim == "auto" else head_dim,
            groups=fields.take("mamba_n_groups"),
            state_size=fields.take("mamba_d_state"),
            taps=fields.take("mamba_d_conv"),
            conv_bias=fields.take("mamba_conv_bias"),
            proj_bias=fields.take("mamba_proj_bias"),
            **recurrences.take_step_limits(fields),
        ),
    }
    return dense.architecture(
        fields,
        recurrences.take_layers(fields, "layer_types", kinds, recurrences.OLDER_KINDS),
        _take_feed(fields),
        **granite.take_factors(fields),
    )


def _take_feed(fields: Fields) -> Feed:
    """An MLP, or experts, where it is the one that all tokens also pass through."""
    shared = fields.take("shared_intermediate_size")
    mlp = Mlp(ffn_hidden_size=shared, activation=dense.take_activation(fields, "hidden_act"))
    number = fields.take("num_local_experts", 0)
    if not number:
        for name in ("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef"):
            fields.ignore(name, "the model has no experts")
        fields.ignore("output_router_logits", "the model has no experts")
        return mlp
    feed = experts.place(fields, granitemoe.take_moe(fields, shared), mlp=mlp)
    assert isinstance(feed, Moe)
    return feed
