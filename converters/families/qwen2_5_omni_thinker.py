"""The thinker of Qwen2.5-Omni: Qwen2.5 that also sees pictures and videos and hears sound, with
three positions of a token.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, omni

from .qwen2 import TABLE as TABLE

BESIDE = ("talker", "token2wav")
"""What names of tensors of the other models in a checkpoint begin with."""


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen2_5OmniThinkerConfig describes."""
    text = omni.take_text(fields)
    rope = take_rope(text, threefold="apart")
    attention = dense.take_attention(text, rope=rope, qkv_bias=True)
    shell = omni.take_shell(fields, "index", stride=4, spare=1)
    return dense.architecture(text, dense.take_windows(text, attention), **shell)
