"""gpt-oss: biases everywhere, attention sinks, windows on some layers, stacked experts."""

from __future__ import annotations

from megatron_policy.converters.architecture import (
    Activation,
    Architecture,
    Attention,
    Moe,
    Scoring,
)
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts
from megatron_policy.converters.families.shared.dense import H, M
from megatron_policy.converters.rows import Columns, Ignore, Role, Row, Whole, assign_part
from megatron_policy.converters.rows.expert_rows import StackedGateUp, StackedRows, StackedWhole

_E = H + "mlp.experts."
TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *dense.NORMS,
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    Columns(
        M + "self_attention.core_attention.softmax_offset",
        (H + "self_attn.sinks",),
        ("num_attention_heads",),
        part=Attention,
        role=Role.SINK,
    ),
    *assign_part(
        Moe,
        Whole(M + "mlp.router.weight", (H + "mlp.router.weight",), ("experts", "hidden_size")),
        Whole(M + "mlp.router.bias", (H + "mlp.router.bias",), ("experts",), role=Role.BIAS),
    ),
    StackedGateUp(experts.EXPERT + "linear_fc1.weight", (_E + "gate_up_proj",), ("hidden_size",)),
    StackedGateUp(
        experts.EXPERT + "linear_fc1.bias", (_E + "gate_up_proj_bias",), (), role=Role.BIAS
    ),
    StackedRows(
        experts.EXPERT + "linear_fc2.weight",
        (_E + "down_proj",),
        ("hidden_size", "ffn_hidden_size"),
    ),
    StackedWhole(
        experts.EXPERT + "linear_fc2.bias",
        (_E + "down_proj_bias",),
        ("hidden_size",),
        role=Role.BIAS,
    ),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a GptOssConfig describes."""
    fields.expect("swiglu_alpha", (1.702,), "the gate is x * sigmoid(1.702 x)")
    fields.expect("swiglu_limit", (7.0,), "gate and up projections are clamped at 7")
    fields.ignore("initial_context_length", "transformers uses that of the rotary embedding")
    chosen = fields.take("num_experts_per_tok")
    fields.expect("experts_per_token", (chosen,), "num_experts_per_tok under another name")
    bias = fields.take("attention_bias", True)
    fields.ignore("hidden_act", "experts always have a clamped SwiGLU")
    attention = dense.take_attention(fields, bias=bias, attention_sinks=True)
    mlp = dense.take_mlp(fields, activation=Activation.CLAMPED_SWIGLU, mlp_bias=True)
    moe = Moe(
        experts=experts.take_experts(fields, "num_local_experts", "num_experts"),
        chosen=chosen,
        ffn_hidden_size=mlp.ffn_hidden_size,
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
        router_bias=True,
    )
    layers = dense.take_windows(fields, attention)
    return dense.architecture(fields, layers, experts.place(fields, moe, mlp=mlp))
