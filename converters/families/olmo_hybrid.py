"""OLMo Hybrid: gated delta nets with norms before mixer and MLP, and on every fourth layer OLMo 2's
attention with norms after both, with or without a rotary embedding.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    Mixer,
    Norms,
    QkNorm,
)
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, norm_rows, recurrences
from megatron_policy.converters.rows import Ignore, Row, assign_part

TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *assign_part(DeltaNet, *norm_rows.before("attention_layer_norm", "feedforward_layer_norm")),
    *recurrences.rows_of_split_delta_net("linear_attn"),
    *assign_part(Attention, *norm_rows.AFTER),
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    *norm_rows.ALL_HEADS,
    *dense.MLP,
)
OTHER_NAMES = (
    ("attention_layer_norm", "input_layernorm"),
    ("feedforward_layer_norm", "post_attention_layernorm"),
    ("post_attention_layernorm", "feedforward_layer_norm"),
)
"""What transformers and vLLM call norms of layers with delta nets in memory, and what releases of
transformers make of a name of attention layers when they save them.
"""
_INITIAL = ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")


def architecture(fields: Fields) -> Architecture:
    """The architecture an OlmoHybridConfig describes."""
    fields.expect("hidden_act", ("silu", "swish"), "delta nets and MLPs have it")
    for name in _INITIAL:
        fields.ignore(f"linear_{name}", "weights are loaded, never initialised at random")
    heads, bias = fields.take("num_attention_heads"), fields.take("attention_bias", False)
    kinds: dict[str, Mixer] = {
        "full_attention": Attention(
            num_attention_heads=heads,
            num_query_groups=fields.take("num_key_value_heads", heads),
            kv_channels=fields.take("head_dim", fields.take("hidden_size") // heads),
            rope=take_rope(fields) if _has_rope(fields) else None,
            qkv_bias=bias,
            proj_bias=bias,
            qk_norm=QkNorm.ALL_HEADS,
            attention_dropout=fields.take("attention_dropout", 0.0),
        ),
        "linear_attention": DeltaNet(
            num_key_heads=fields.take("linear_num_key_heads"),
            num_value_heads=fields.take("linear_num_value_heads"),
            key_head_dim=fields.take("linear_key_head_dim"),
            value_head_dim=fields.take("linear_value_head_dim"),
            taps=fields.take("linear_conv_kernel_dim"),
            doubled=fields.take("linear_allow_neg_eigval"),
            norm_epsilon=1e-5,
        ),
    }
    mixers = recurrences.take_layers(fields, "layer_types", kinds)
    norms = [Norms.AFTER if isinstance(each, Attention) else Norms.BEFORE for each in mixers]
    return dense.architecture(fields, mixers, norms=norms)


def _has_rope(fields: Fields) -> bool:
    """Whether heads are rotated: published configs say by a base of null that they are not."""
    section = fields.section("rope_parameters")
    if section is None or section.take("rope_theta", None) is not None:
        return True
    section.ignore("rope_theta", "no layer has a rotary embedding")
    section.expect("rope_type", ("default",), "no layer has a rotary embedding")
    fields.ignore("partial_rotary_factor", "no layer has a rotary embedding")
    return False
