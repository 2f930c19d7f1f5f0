"""Qwen3.5 with experts as published: within a model that also reads pictures, see `qwen3_5.py`."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import qwen3_5, qwen3_5_moe_text
from megatron_policy.converters.rows import Ignore, Row

TABLE: tuple[Row | Ignore, ...] = qwen3_5.make_table(qwen3_5_moe_text.TABLE)


def architecture(fields: Fields) -> Architecture:
    """The architecture of the text model of a Qwen3_5MoeConfig."""
    return qwen3_5.take_text(fields, qwen3_5_moe_text.architecture)
