"""GLM-4.5V: GLM-4.5's experts beside what GLM-4.1V has around its decoder, with three positions of
a token.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families import glm4_moe, glm4v
from megatron_policy.converters.families.shared import dense, pictures

TABLE = dense.rename((*dense.ENDS, *glm4_moe.LAYER), {"model.": "model.language_model."})


def architecture(fields: Fields) -> Architecture:
    """The architecture a Glm4vMoeConfig describes."""
    text = pictures.take_text(fields)
    text.expect("use_qk_norm", (False,), "the class has no norms of queries and keys")
    attention = dense.take_attention(
        text,
        rope=take_rope(text, partial=True, threefold="apart"),
        qkv_bias=text.take("attention_bias", True),
    )
    feed = glm4_moe.take_feed(text)
    return dense.architecture(text, attention, feed, **glm4v.take_shell(fields))
