"""LLaVA-OneVision: LLaVA-NeXT with fewer features of large pictures, in which several pictures of a
row are each seen as a whole alone, and with videos.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_policy.converters.architecture import FrameMedium
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import pictures

from . import llava_next
from .llava_next import NAMES as NAMES
from .llava_next import OTHER_NAMES as OTHER_NAMES
from .llava_next import PATHS as PATHS


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of the pictures of a LlavaOnevisionConfig."""
    ratio = str(fields.take("vision_aspect_ratio"))
    if (found := re.fullmatch(r"anyres_max_([1-9]\d*)", ratio)) is None:
        fields.refuse("vision_aspect_ratio", ratio, "it can be anyres_max_ and a number of tiles")
    most = 1 if found is None else int(found[1])
    image, video = pictures.take_tokens(fields, "image_token_index", "video_token_index")
    still = llava_next.take_tiles(fields, image, counts="batch_num_images", most=most)
    films = FrameMedium(video, "pixel_values_videos", still.patch, still.channels, still.tile)
    return pictures.surround(fields, "", still, films)
