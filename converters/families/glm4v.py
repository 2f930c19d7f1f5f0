"""GLM-4.1V: GLM-4 that also sees pictures, with three positions of a token. Videos, whose
placeholders are those of pictures, are not read.
"""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import Architecture, Norms
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families import glm4
from megatron_policy.converters.families.shared import dense, pictures

TABLE = dense.rename(glm4.TABLE, {"model.": "model.language_model."})
_OF_VIDEOS = ("video_token_id", "video_start_token_id", "video_end_token_id")


def architecture(fields: Fields) -> Architecture:
    """The architecture a Glm4vConfig describes."""
    text = pictures.take_text(fields)
    rope = take_rope(text, partial=True, interleaved=True, threefold="apart")
    attention = dense.take_attention(text, rope=rope, qkv_bias=True)
    text.ignore("attention_bias", "the class always has biases of queries, keys and values")
    return dense.architecture(text, attention, norms=Norms.AROUND, **take_shell(fields))


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of pictures."""
    for name in _OF_VIDEOS:
        fields.ignore(name, "a token of videos, which batches do not have")
    marks = ("image_start_token_id", "image_end_token_id")
    return pictures.take_shell(fields, "model.", marks=marks, videos=False)
