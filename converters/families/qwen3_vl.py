"""Qwen3-VL (dense): Qwen3 that also sees pictures and videos, with three positions of a token."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Attention, QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families import qwen3
from megatron_policy.converters.families.shared import dense, pictures

TABLE = dense.rename(qwen3.TABLE, {"model.": "model.language_model."})


def take_attention(text: Fields) -> Attention:
    """The attention of all layers."""
    return dense.take_attention(
        text,
        rope=take_rope(text, threefold="alternating"),
        bias=text.take("attention_bias", False),
        qk_norm=QkNorm.PER_HEAD,
    )


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3VLConfig describes."""
    text = pictures.take_text(fields)
    return dense.architecture(text, take_attention(text), **pictures.take_shell(fields, "model."))
