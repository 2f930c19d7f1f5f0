"""Kimi K2.5: Kimi K2's decoder beside a tower whose files have its queries, keys and values in one
tensor. Videos, of which transformers' class reads none of several frames, are not read.
"""

from __future__ import annotations

from math import prod
from typing import Any

from megatron_policy.converters.architecture import PatchMedium, Shell
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import pictures
from megatron_policy.converters.rows import Row

from .llava import NAMES as NAMES

PATHS = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
)
_ON_FILE = (
    ("vision_tower.layers.", "vision_tower.encoder.blocks."),
    ("vision_tower.final", "vision_tower.encoder.final"),
    (".norm1.", ".norm0."),
    (".norm2.", ".norm1."),
    (".fc1.", ".fc0."),
    (".fc2.", ".fc1."),
    (".attn.proj.", ".wo."),
    ("pos_emb.position_embeddings", "pos_emb.weight"),
    ("projector.in_proj.", "projector.proj.0."),
    ("projector.out_proj.", "projector.proj.2."),
)
"""Parts of the names of transformers' parameters, one after another, and what files have."""
_PROJECTIONS = (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj.")


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of the pictures of a Kimi_K25Config."""
    vision = fields.take("vision_config")
    kernel, patch = vision["merge_kernel_size"], vision["patch_size"]
    if len({*kernel}) > 1:
        fields.refuse("vision_config.merge_kernel_size", kernel, "a token is made of a square")
    (image,) = pictures.take_tokens(fields, "image_token_id")
    fields.expect("media_placeholder_token_id", (image,), "image_token_id is the same token")
    for name in ("vision_start_token_id", "vision_end_token_id", "projection_hidden_size"):
        fields.ignore(name, pictures.BY_CLASS)
    fields.ignore("projection_layer_norm_eps", pictures.BY_CLASS)
    for name in ("video_token_id", "video_placeholder", "use_unified_vision_chunk"):
        fields.ignore(name, "of videos, which batches do not have")
    fields.ignore("auto_map", "the makers' own code, which transformers replaces")
    fields.ignore("ignore_index", "a label of transformers' own loss, which is not used here")
    heads, width = vision["num_attention_heads"], vision["hidden_size"]
    if width % (2 * heads):  # pairs of a head's values turn together
        why = f"hidden_size is {width}, of which every head has as many values, an even number"
        fields.refuse("vision_config.num_attention_heads", heads, why)
    medium = PatchMedium(
        image, "pixel_values", prod(kernel), "image_grid_thw", (3, patch, patch), still=True
    )
    return pictures.surround(fields, "", medium, heads=heads)


def make_shell_rows(shell: Shell) -> tuple[Row, ...]:
    """The rows of the shell's tensors by the names on file, those of one tensor side by side."""
    return pictures.name_on_file(shell, _ON_FILE, _PROJECTIONS, ".wqkv.")
