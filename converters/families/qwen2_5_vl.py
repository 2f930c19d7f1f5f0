"""Qwen2.5-VL: Qwen2.5 that also sees pictures and videos, with three positions of a token."""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, pictures

from .qwen2 import TABLE as TABLE

PATHS = (
    *((f"model.{p}", f"model.language_model.{p}") for p in ("embed_tokens", "layers.", "norm.")),
    ("visual.", "model.visual."),
)
"""What names of tensors begin with, and in its place the paths of transformers' modules, which some
of its releases write.
"""
OTHER_NAMES = PATHS


SECONDS: dict[str, Any] = {"seconds": "second_per_grid_ts", "timeless": True}
"""What the class reads of the time between the frames of videos."""


def architecture(fields: Fields, seconds: dict[str, Any] = SECONDS) -> Architecture:
    """The architecture a Qwen2_5_VLConfig describes, whose class reads these `seconds`."""
    text = pictures.take_text(fields)
    rope = take_rope(text, threefold="apart")
    attention = dense.take_attention(text, rope=rope, qkv_bias=True)
    shell = pictures.take_shell(fields, "", by_frame=False, **seconds)
    return dense.architecture(text, dense.take_windows(text, attention), **shell)
