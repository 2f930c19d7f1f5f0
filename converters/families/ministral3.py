"""Ministral 3 and Devstral 2: Mistral whose queries grow with their position in long texts."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import QueryGrowth
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense

TABLE = (*dense.ENDS, *dense.BLOCK)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Ministral3Config describes."""
    attention = dense.take_attention(
        fields,
        window=fields.take("sliding_window", None),
        query_growth=_take_growth(fields),
    )
    return dense.architecture(fields, attention)


def _take_growth(fields: Fields) -> QueryGrowth | None:
    """How queries grow, which the fields of the rotary embedding say; None if they do not."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    if section is None:
        return None
    section.ignore("max_position_embeddings", "the field of the whole config counts")
    rate = section.take("llama_4_scaling_beta", 0)
    length = section.take("original_max_position_embeddings", None)
    if not rate:
        return None
    if not isinstance(length, int) or length < 1:
        section.refuse("original_max_position_embeddings", length, "must be a positive integer")
        return None
    return QueryGrowth(float(rate), length)
