"""LLaVA: the tower of CLIP or SigLIP beside a decoder of another family. All pictures are of one
size.
"""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import PictureMedium
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import pictures

NAMES = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
PATHS = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("vision_tower.", "model.vision_tower."),
)
"""What names of tensors begin with, and the paths of transformers' modules in its place."""
OF_MAKERS = tuple(
    (f"vision_tower.{part}", f"vision_tower.vision_model.{part}")
    for part in ("embeddings.", "encoder.", "head.", "post_layernorm.", "pre_layrnorm.")
)
"""What makers call parts of the tower, where transformers 5 has shorter names."""
OTHER_NAMES = (*PATHS, *OF_MAKERS)
"""The same, and the paths of modules, which some releases of transformers write."""
_OF_CLASS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""By the kind of tower: how many tokens of a picture stand before those of its patches."""


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of the pictures of a LlavaConfig."""
    vision, further = take_tower(fields)
    medium = PictureMedium(
        pictures.take_tokens(fields, "image_token_index")[0],
        "pixel_values",
        merged=1,
        patch=vision["patch_size"],
        channels=vision["num_channels"],
        further=further,
        fixed=(vision["image_size"],) * 2,
    )
    return pictures.surround(fields, "", medium)


def take_tower(fields: Fields) -> tuple[dict[str, Any], int]:
    """The fields of the tower, and how many features it has beside those of patches."""
    vision = fields.take("vision_config")
    if (kind := vision["model_type"]) not in _OF_CLASS:
        fields.refuse("vision_config.model_type", kind, f"it can be {' or '.join(_OF_CLASS)}")
    strategy = fields.take("vision_feature_select_strategy", "default")
    for name in ("image_seq_length", "multimodal_projector_bias", "vision_feature_layer"):
        fields.ignore(name, pictures.BY_CLASS)
    fields.ignore("projector_hidden_act", pictures.BY_CLASS)
    fields.ignore("ignore_index", "a label of transformers' own loss, which is not used here")
    fields.ignore("vocab_size", "the decoder's section says it")
    return vision, _OF_CLASS.get(kind, 0) - (strategy == "default")
