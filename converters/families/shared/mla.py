"""Multi-head latent attention (MLA; DeepSeek-V2, 2024): its rows and its config fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.rotary import DynamicScaling, LongScaling
from megatron_policy.converters.architecture.traits import Mla
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.rows import Columns, Role, Rows, Whole

from .dense import H, M

_M, _H = M + "self_attention.", H + "self_attn."

ATTENTION = (
    Columns(
        _M + "linear_q_proj.weight",
        (_H + "q_proj.weight",),
        ("query_size", "hidden_size"),
        when="!mla.q_lora_rank",
    ),
    Whole(
        _M + "linear_q_down_proj.weight",
        (_H + "q_a_proj.weight",),
        ("mla.q_lora_rank", "hidden_size"),
        when="mla.q_lora_rank",
    ),
    Whole(
        _M + "q_layernorm.weight",
        (_H + "q_a_layernorm.weight",),
        ("mla.q_lora_rank",),
        when="mla.q_lora_rank",
        role=Role.NORM,
    ),
    Columns(
        _M + "linear_q_up_proj.weight",
        (_H + "q_b_proj.weight",),
        ("query_size", "mla.q_lora_rank"),
        when="mla.q_lora_rank",
    ),
    Whole(
        _M + "linear_kv_down_proj.weight",
        (_H + "kv_a_proj_with_mqa.weight",),
        ("mla.down_size", "hidden_size"),
    ),
    Whole(
        _M + "kv_layernorm.weight",
        (_H + "kv_a_layernorm.weight",),
        ("mla.kv_lora_rank",),
        role=Role.NORM,
    ),
    Columns(
        _M + "linear_kv_up_proj.weight",
        (_H + "kv_b_proj.weight",),
        ("expanded_size", "mla.kv_lora_rank"),
    ),
    Rows(
        _M + "linear_proj.weight",
        (_H + "o_proj.weight",),
        ("hidden_size", "context_size"),
    ),
)


def with_mla(architecture: Architecture, fields: Fields) -> Architecture:
    """The architecture with MLA; of its attention, `architecture` only has the number of heads."""
    heads = architecture.num_attention_heads
    fields.expect("num_key_value_heads", (heads,), "every head has keys and values of its own")
    fields.expect("rope_interleave", (True,), "neighbouring dimensions are rotated together")
    fields.expect("attention_bias", (False,), "Megatron-Core's latent attention has no biases")
    fields.ignore("head_dim", "the rotated part of a head, which qk_rope_head_dim gives")
    fields.ignore("qk_head_dim", "the sum of qk_nope_head_dim and qk_rope_head_dim")
    mla = Mla(
        q_lora_rank=fields.take("q_lora_rank", None),
        kv_lora_rank=fields.take("kv_lora_rank"),
        qk_nope_head_dim=fields.take("qk_nope_head_dim"),
        qk_rope_head_dim=fields.take("qk_rope_head_dim"),
        v_head_dim=fields.take("v_head_dim"),
    )
    if isinstance(architecture.rope.scaling, DynamicScaling | LongScaling):
        kind = type(architecture.rope.scaling).__name__
        fields.refuse("rope_parameters", kind, "latent attention has frequencies of any length")
    size = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return replace(
        architecture,
        num_query_groups=heads,
        kv_channels=size,
        mla=mla,
        attention_scale=_attention_scale(fields, size),
    )


def _attention_scale(fields: Fields, head_size: int) -> float | None:
    """The factor on query-key products where YaRN changes it; None: 1 / sqrt(head size)."""
    rope: Mapping[str, Any] = fields.take("rope_parameters", {}) or fields.take("rope_scaling", {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor, correction = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0.0)
    if kind == "default" or not correction or factor <= 1:
        return None
    return float((0.1 * correction * math.log(factor) + 1.0) ** 2 / math.sqrt(head_size))
