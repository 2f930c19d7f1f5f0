"""InternVL: InternViT beside a decoder of another family. Pictures are cut into square tiles of one
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_policy.converters.architecture import PictureMedium
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import pictures

from .llava import NAMES as NAMES
from .llava import PATHS as PATHS

OTHER_NAMES = PATHS
"""What names of tensors begin with, and what some releases of transformers write in its place."""


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of the pictures of an InternVLConfig."""
    vision, ratio = fields.take("vision_config"), fields.take("downsample_ratio")
    side = max(round(1 / ratio), 1)
    if side * ratio != 1:
        fields.refuse("downsample_ratio", ratio, "it must be 1 divided by a whole number")
    fields.expect("vision_feature_select_strategy", ("default",), "features have to be a square")
    for name in ("image_seq_length", "projector_hidden_act", "vision_feature_layer"):
        fields.ignore(name, pictures.BY_CLASS)
    medium = PictureMedium(
        pictures.take_tokens(fields, "image_token_id")[0],
        "pixel_values",
        merged=side**2,
        patch=_take_side(fields, vision, "patch_size"),
        channels=vision["num_channels"],
        fixed=(_take_side(fields, vision, "image_size"),) * 2,
    )
    return pictures.surround(fields, "", medium)


def _take_side(fields: Fields, vision: Mapping[str, Any], name: str) -> int:
    """The pixels of a side of what the tower's field `name` measures."""
    height, width = size = vision[name]
    if height != width:
        fields.refuse(f"vision_config.{name}", size, "pictures and patches have to be squares")
    return int(height)
