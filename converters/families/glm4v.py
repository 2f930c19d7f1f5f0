"""GLM-4.1V: GLM-4 that also sees pictures and videos, whose placeholders are the same, with three
positions of a token.
"""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import Architecture, Norms
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families import glm4
from megatron_policy.converters.families.shared import dense, pictures

TABLE = dense.rename(glm4.TABLE, {"model.": "model.language_model."})
_MARKS = (
    *("image_start_token_id", "image_end_token_id"),
    *("video_token_id", "video_start_token_id", "video_end_token_id"),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Glm4vConfig describes."""
    text = pictures.take_text(fields)
    rope = take_rope(text, partial=True, interleaved=True, threefold="apart")
    attention = dense.take_attention(text, rope=rope, qkv_bias=True)
    text.ignore("attention_bias", "the class always has biases of queries, keys and values")
    return dense.architecture(text, attention, norms=Norms.AROUND, **take_shell(fields))


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of pictures and videos."""
    return pictures.take_shell(fields, "model.", marks=_MARKS, videos="image_token_id")
