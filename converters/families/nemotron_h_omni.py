"""Nemotron 3 Omni: Nemotron-H's decoder beside the towers of RADIO, which sees pictures and frames
of videos, and of Parakeet, which hears sound. Its files keep the names that its makers gave them.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from megatron_policy.converters.architecture import (
    FilmMedium,
    Medium,
    PatchMedium,
    Shell,
    SoundMedium,
)
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import pictures
from megatron_policy.converters.rows import Ignore, Row

NAMES = {"backbone.": "language_model.backbone.", "lm_head.": "language_model.lm_head."}
PATHS = (("language_model.backbone.", "language_model.model."),)
OTHER_NAMES = (("vision_projector.vision_final_layernorm.", "vision_final_layernorm."),)
"""What files call a norm, and what transformers 5.23 does."""
MODEL_TYPES = tuple(f"NemotronH_{size}_Omni_Reasoning_V3" for size in ("Nano", "Super"))
"""What config.json of its makers has for model_type, and for the model's class."""
_TOWER, _RADIO = "vision_model.", "vision_model.radio_model.model."
_EARS, _PARAKEET = "audio_tower.", "sound_encoder.encoder."
_ON_FILE = (
    (f"{_TOWER}embeddings.video_patch_projection.", f"{_RADIO}patch_generator.video_embedder."),
    (f"{_TOWER}embeddings.patch_projection.", f"{_RADIO}patch_generator.embedder."),
    (f"{_TOWER}embeddings.position_embedding", f"{_RADIO}patch_generator.pos_embed"),
    (f"{_TOWER}embeddings.cls_register_token", f"{_RADIO}patch_generator.cls_token.token"),
    (f"{_TOWER}encoder.layer.", f"{_RADIO}blocks."),
    (".attention.o_proj.", ".attn.proj."),
    ("multi_modal_projector.layer_norm.", "mlp1.0."),
    ("multi_modal_projector.linear_1.", "mlp1.1."),
    ("multi_modal_projector.linear_2.", "mlp1.3."),
    (_EARS, _PARAKEET),
    ("embed_audio.layer_norm.", "sound_projection.norm."),
    ("embed_audio.linear_1.", "sound_projection.linear1."),
    ("embed_audio.linear_2.", "sound_projection.linear2."),
    OTHER_NAMES[0][::-1],
)
"""Parts of the names of transformers' parameters, one after another, and what files have."""
_PROJECTIONS = (".attention.q_proj.", ".attention.k_proj.", ".attention.v_proj.")
BESIDE = (
    Ignore("vision_model.radio_model.input_conditioner.*", "processors do it", carried=True),
    Ignore("vision_model.radio_model.summary_idxs", "summaries are not used", carried=True),
    Ignore(f"{_PARAKEET}feature_extractor.*", "processors do it", carried=True),
    Ignore(f"{_PARAKEET}*.num_batches_tracked", "statistics are not measured", carried=True),
)
"""What files have beside the weights."""
_OF_MAKERS = (
    *("image_tag_type", "img_context_token", "img_end_token", "img_start_token"),
    *("max_sequence_length", "norm_mean", "norm_std", "patch_size", "ps_version", "template"),
    *("sound_context_token", "video_context_token"),
)
"""Of their processors and of their own code."""
_RATIO = 0.5
"""By which the class counts the tokens of a picture, whatever the config says."""
_WITH_VIDEOS = (5, 24)
"""The release of transformers whose class reads videos."""
_HOP = 2
"""Frames of sound of which each of a tower's first convolutions makes one."""


def take_shell(fields: Fields) -> dict[str, Any]:
    """What `Architecture` says of the pictures, videos and sound of a
    NemotronH_Omni_Reasoning_V3_Config.
    """
    vision = fields.take("vision_config")
    fields.expect("downsample_ratio", (_RATIO,), "its class counts tokens so")
    for name in ("force_image_size", "projector_hidden_size", "vision_hidden_size"):
        fields.ignore(name, pictures.BY_CLASS)
    for name in _OF_MAKERS:
        fields.ignore(name, "of the makers' processors, or of their code, which is not run")
    fields.ignore("auto_map", "the makers' own code, which transformers' class replaces")
    fields.ignore("video_token_id", "placeholders of videos are those of pictures")
    audio, patch = fields.take("audio_config", None), vision["patch_size"]
    heard = () if audio is None else ("audio_token_id",)
    placeholder, *sound = pictures.take_tokens(fields, "image_token_id", *heard)
    merged, channels = round(1 / _RATIO) ** 2, vision["num_channels"]
    media: list[Medium] = [
        PatchMedium(
            placeholder,
            "pixel_values",
            merged,
            "image_grid_hw",
            (channels * patch**2,),
            flat=True,
        ),
        FilmMedium(
            placeholder,
            "pixel_values_videos",
            merged,
            patch,
            channels * fields.take("video_temporal_patch_size"),
            _refuse_videos(fields),
        ),
    ]
    if audio is None:
        fields.ignore("audio_token_id", "the model has no tower that hears")
    else:
        media.append(_describe_sound(fields, audio, *sound))
    return pictures.surround(fields, "", *media, optional=".lambda1")


def make_shell_rows(shell: Shell) -> tuple[Row, ...]:
    """The rows of the shell's tensors by the names on file, those of one tensor side by side."""
    return pictures.name_on_file(shell, _ON_FILE, _PROJECTIONS, ".attn.qkv.")


def _refuse_videos(fields: Fields) -> str:
    """Why the class cannot be trained on videos; "" if it can."""
    release, name = version("transformers"), "video_pruning_rate"
    pruned = fields.take(name) > 0
    if tuple(map(int, release.split(".")[:2])) < _WITH_VIDEOS:
        return f"transformers {release} fails at them: install 5.24 or newer"
    why = "its class leaves out some of their tokens"
    return f"{why}: set policy.hf_config_overrides.{name} to 0.0" if pruned else ""


def _describe_sound(fields: Fields, audio: dict[str, Any], placeholder: int) -> SoundMedium:
    """Clips, of which the class counts one frame more than their mask does. What makes the last of
    their features depends on how far they are filled up.
    """
    section, stride = "audio_config.", audio["subsampling_factor"]
    hops = {"subsampling_conv_stride": _HOP, "subsampling_conv_kernel_size": 2 * _HOP - 1}
    for name, legal in hops.items():
        if audio[name] != legal:
            fields.refuse(section + name, audio[name], f"frames are counted with {legal}")
    if stride & (stride - 1):
        fields.refuse(f"{section}subsampling_factor", stride, f"it must be a power of {_HOP}")
    return SoundMedium(
        placeholder,
        "input_features",
        mask="input_features_mask",
        bins=audio["num_mel_bins"],
        stride=stride,
        spare=stride,
        mixed=True,
        bins_last=True,
        beyond=1,
    )
