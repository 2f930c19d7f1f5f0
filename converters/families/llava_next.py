"""LLaVA-NeXT (LLaVA 1.6): LLaVA with pictures of any size, which are seen in tiles."""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import TileMedium
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import pictures

from . import llava
from .llava import NAMES as NAMES

PATHS = (*llava.PATHS, ("image_newline", "model.image_newline"))
OTHER_NAMES = (*PATHS, *llava.OF_MAKERS)


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of the pictures of a LlavaNextConfig."""
    (image,) = pictures.take_tokens(fields, "image_token_index")
    return pictures.surround(fields, "", take_tiles(fields, image))


def take_tiles(fields: Fields, image: int, **more: Any) -> TileMedium:
    """The medium of pictures, whose placeholder is this token, with `more` arguments of it."""
    fields.expect("use_image_newline_parameter", (True,), "a feature ends each row of others")
    vision, further = llava.take_tower(fields)
    if further:
        fields.refuse(
            "vision_feature_select_strategy",
            fields.take("vision_feature_select_strategy"),
            f"a tile of a {vision['model_type']} has features of its patches alone with the other",
        )
    return TileMedium(
        image,
        "pixel_values",
        merged=1,
        patch=vision["patch_size"],
        channels=vision["num_channels"],
        tile=vision["image_size"],
        canvases=tuple((height, width) for height, width in fields.take("image_grid_pinpoints")),
        sizes="image_sizes",
        **more,
    )
