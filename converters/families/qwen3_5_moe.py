"""Qwen3.5 with experts as published: its text model that also sees pictures, see `qwen3_5.py`."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import qwen3_5, qwen3_5_moe_text, qwen3_5_text
from megatron_policy.converters.families.shared import dense, pictures

TABLE = dense.rename(qwen3_5_moe_text.TABLE, qwen3_5.WITHIN)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3_5MoeConfig describes."""
    text = pictures.take_text(fields)
    feed = qwen3_5_moe_text.take_feed(text)
    return qwen3_5_text.make_architecture(text, feed, **qwen3_5.take_shell(fields))
