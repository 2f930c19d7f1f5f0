"""Qwen2-VL: Qwen2 that also sees pictures and videos, as Qwen2.5-VL does, whatever the time between
the frames of a video.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import qwen2_5_vl

from .qwen2 import TABLE as TABLE
from .qwen2_5_vl import OTHER_NAMES as OTHER_NAMES
from .qwen2_5_vl import PATHS as PATHS


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen2VLConfig describes."""
    return qwen2_5_vl.architecture(fields, {})
