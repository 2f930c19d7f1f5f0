"""Idefics3 and SmolVLM: a tower like SigLIP's beside a decoder of another family. Pictures are cut
into square tiles of one size.
"""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import PictureMedium
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import pictures

NAMES = {"model.": "model.text_model."}
_OF_MAKERS = ("_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config")
"""Fields of published decoders that say how they were trained, or of a part that none has."""


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of the pictures of an Idefics3Config."""
    text = pictures.take_text(fields)
    for name in _OF_MAKERS:
        text.ignore(name, "nothing that transformers' class reads")
    text.ignore("pixel_shuffle_factor", "scale_factor of the whole model counts")
    for name in ("qk_layer_norms", "use_resampler"):
        text.expect(name, (False,), "transformers' class has none")
    for name in ("_pad_token_id", "use_reentrant_checkpointing"):
        fields.ignore(name, "nothing that a model computes with")
    fields.ignore("vocab_size", "that of the decoder's section counts")
    vision = fields.take("vision_config")
    medium = PictureMedium(
        pictures.take_tokens(fields, "image_token_id")[0],
        "pixel_values",
        merged=fields.take("scale_factor") ** 2,
        patch=vision["patch_size"],
        channels=vision["num_channels"],
        fixed=(vision["image_size"],) * 2,
        by_row=True,
    )
    return pictures.surround(fields, "model.", medium)
