"""Gemma 3 as published, with pictures: SigLIP's tower beside the decoder of `gemma3_text`. All
pictures are of one size, and the tokens of one see each other in both directions.
"""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import PictureMedium
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import pictures

from .llava import NAMES as NAMES
from .llava import OTHER_NAMES as OTHER_NAMES
from .llava import PATHS as PATHS

_TOWER = "siglip_vision_model"


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of the pictures of a Gemma3Config."""
    vision, tokens = fields.take("vision_config"), fields.take("mm_tokens_per_image")
    if (kind := vision["model_type"]) != _TOWER:
        fields.refuse("vision_config.model_type", kind, f"it can be {_TOWER}")
    if cap := pictures.take_text(fields).take("final_logit_softcapping", None):
        why = "transformers does not apply it beside a tower"
        fields.refuse("text_config.final_logit_softcapping", cap, why)
    side = vision["image_size"] // vision["patch_size"]
    if side**2 % tokens:
        why = f"a picture has {side} x {side} patches, of which as many have to make each token"
        fields.refuse("mm_tokens_per_image", tokens, why)
    for name in ("boi_token_index", "eoi_token_index"):
        fields.ignore(name, pictures.BY_CLASS)
    medium = PictureMedium(
        pictures.take_tokens(fields, "image_token_index")[0],
        "pixel_values",
        merged=side**2 // tokens,
        patch=vision["patch_size"],
        channels=vision["num_channels"],
        fixed=(vision["image_size"],) * 2,
    )
    return pictures.surround(fields, "", medium, both_ways=True)
