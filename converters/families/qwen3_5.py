"""Qwen3.5 as published: its text model, of the family qwen3_5_text, that also sees pictures and
videos, with three positions of a token.
"""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import qwen3_5_text
from megatron_policy.converters.families.shared import dense, pictures

WITHIN = {"model.": "model.language_model."}
TABLE = dense.rename(qwen3_5_text.TABLE, WITHIN)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3_5Config describes."""
    text = pictures.take_text(fields)
    return qwen3_5_text.make_architecture(text, dense.take_mlp(text), **take_shell(fields))


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of pictures and videos."""
    fields.ignore("language_model_only", "which part of the model an engine loads")
    return pictures.take_shell(fields, "model.")
