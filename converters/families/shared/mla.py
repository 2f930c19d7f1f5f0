"""Multi-head latent attention (MLA; DeepSeek-V2, 2024): its rows and its config fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_policy.converters.architecture import Mla
from megatron_policy.converters.architecture.rotary import DynamicScaling, LongScaling
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.rows import Columns, Role, Rows, Whole, assign_part

from .dense import H, M

_M, _H = M + "self_attention.", H + "self_attn."

_COMPRESSED, _DIRECT = "q_lora_rank", "!q_lora_rank"

ATTENTION = assign_part(
    Mla,
    Columns(
        _M + "linear_q_proj.weight",
        (_H + "q_proj.weight",),
        ("query_size", "hidden_size"),
        when=_DIRECT,
    ),
    Whole(
        _M + "linear_q_down_proj.weight",
        (_H + "q_a_proj.weight",),
        ("q_lora_rank", "hidden_size"),
        when=_COMPRESSED,
    ),
    Whole(
        _M + "q_layernorm.weight",
        (_H + "q_a_layernorm.weight",),
        ("q_lora_rank",),
        when=_COMPRESSED,
        role=Role.NORM,
    ),
    Columns(
        _M + "linear_q_up_proj.weight",
        (_H + "q_b_proj.weight",),
        ("query_size", "q_lora_rank"),
        when=_COMPRESSED,
    ),
    Whole(
        _M + "linear_kv_down_proj.weight",
        (_H + "kv_a_proj_with_mqa.weight",),
        ("down_size", "hidden_size"),
    ),
    Whole(
        _M + "kv_layernorm.weight",
        (_H + "kv_a_layernorm.weight",),
        ("kv_lora_rank",),
        role=Role.NORM,
    ),
    Columns(
        _M + "linear_kv_up_proj.weight",
        (_H + "kv_b_proj.weight",),
        ("expanded_size", "kv_lora_rank"),
    ),
    Rows(
        _M + "linear_proj.weight",
        (_H + "o_proj.weight",),
        ("hidden_size", "context_size"),
    ),
)


def take_mla(fields: Fields) -> Mla:
    """The latent attention of all layers."""
    heads, rope = fields.take("num_attention_heads"), take_rope(fields)
    fields.expect("num_key_value_heads", (heads,), "every head has keys and values of its own")
    fields.expect("rope_interleave", (True,), "neighbouring dimensions are rotated together")
    fields.expect("attention_bias", (False,), "Megatron-Core's latent attention has no biases")
    fields.ignore("head_dim", "the rotated part of a head, which qk_rope_head_dim gives")
    fields.ignore("qk_head_dim", "the sum of qk_nope_head_dim and qk_rope_head_dim")
    if isinstance(rope.scaling, DynamicScaling | LongScaling):
        kind = type(rope.scaling).__name__
        fields.refuse("rope_parameters", kind, "latent attention has frequencies of any length")
    plain, turned = fields.take("qk_nope_head_dim"), fields.take("qk_rope_head_dim")
    return Mla(
        num_attention_heads=heads,
        rope=rope,
        q_lora_rank=fields.take("q_lora_rank", None),
        kv_lora_rank=fields.take("kv_lora_rank"),
        qk_nope_head_dim=plain,
        qk_rope_head_dim=turned,
        v_head_dim=fields.take("v_head_dim"),
        attention_dropout=fields.take("attention_dropout", 0.0),
        attention_scale=_attention_scale(fields, plain + turned),
    )


def _attention_scale(fields: Fields, head_size: int) -> float | None:
    """The factor on query-key products where YaRN changes it; None: 1 / sqrt(head size)."""
    rope: Mapping[str, Any] = fields.take("rope_parameters", {}) or fields.take("rope_scaling", {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor, correction = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0.0)
    if kind == "default" or not correction or factor <= 1:
        return None
    return float((0.1 * correction * math.log(factor) + 1.0) ** 2 / math.sqrt(head_size))
