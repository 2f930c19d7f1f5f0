"""Mistral 3: Pixtral's tower beside a decoder of another family. Pictures are of any size."""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import PictureMedium
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import pictures

from .llava import NAMES as NAMES
from .llava import PATHS as PATHS

OTHER_NAMES = PATHS
"""What names of tensors begin with, and what some releases of transformers write in its place."""


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of the pictures of a Mistral3Config."""
    for name in ("multimodal_projector_bias", "projector_hidden_act", "vision_feature_layer"):
        fields.ignore(name, pictures.BY_CLASS)
    vision = fields.take("vision_config")
    medium = PictureMedium(
        pictures.take_tokens(fields, "image_token_index")[0],
        "pixel_values",
        merged=fields.take("spatial_merge_size") ** 2,
        patch=vision["patch_size"],
        channels=vision["num_channels"],
        sizes="image_sizes",
    )
    return pictures.surround(fields, "", medium)
