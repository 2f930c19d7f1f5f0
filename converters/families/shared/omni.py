"""What families share that also see pictures and videos and hear sound: the thinkers of Qwen-Omni,
alone or in a checkpoint with the models that speak, which are not trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_policy.converters.architecture import SoundMedium
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.quantisation import SECTION
from megatron_policy.converters.rows import Ignore, Row

from . import dense, pictures

PATHS = (
    ("thinker.", ""),
    ("model.", "model.language_model."),
    ("visual.", "model.visual."),
    ("audio_tower.", "model.audio_tower."),
)
"""What names of tensors begin with, and the paths of transformers' modules in its place, one after
another.
"""
_PARTS = {"qwen2_5_omni": "thinker", "qwen3_omni_moe": "thinker"}
"""By the model_type of such a checkpoint, the model that is trained: names of its tensors begin
with that, and its own model_type ends so.
"""
_OF_ALL = ("dtype", "torch_dtype", SECTION, "transformers_version")
"""What config.json says of all models."""
_BY_CLASS = (
    *("audio_end_token_id", "vision_end_token_id", "vision_token_id", "user_token_id"),
    *("position_id_per_seconds", "seconds_per_chunk"),
)
_OF_MAKERS = {"ignore_index": "a label that a loss leaves out", "init_std": "weights are loaded"}


def take_text(fields: Fields) -> Fields:
    """The decoder's section."""
    text = pictures.take_text(fields)
    text.ignore("init_std", _OF_MAKERS["init_std"])
    return text


def take_shell(fields: Fields, ending: str, **sound: Any) -> dict[str, Any]:
    """What `Architecture` says of pictures, videos and sound, of which `sound` are further fields
    of `SoundMedium`. The names of the fields with placeholders end so.
    """
    for name in _BY_CLASS:
        fields.ignore(name, pictures.BY_CLASS)
    for name, why in _OF_MAKERS.items():
        fields.ignore(name, why)
    kinds = [f"{kind}_token_{ending}" for kind in ("image", "video", "audio")]
    starts = ("vision_start_token_id", "audio_start_token_id")
    image, video, audio, start, before = pictures.take_tokens(fields, *kinds, *starts)
    seconds = "video_second_per_grid"
    media, deep = pictures.take_media(fields, image, video, start=start, seconds=seconds)
    clips = SoundMedium(
        audio,
        "input_features",
        start=before,
        mask="feature_attention_mask",
        bins=fields.take("audio_config")["num_mel_bins"],
        **sound,
    )
    prefix = fields.take(pictures.PART, "")
    return pictures.surround(fields, prefix, *media, clips, deep=deep)


def name_rows(
    rows: Iterable[Row | Ignore], fields: Fields, others: tuple[str, ...]
) -> tuple[Row | Ignore, ...]:
    """The rows of a decoder by the names of a checkpoint of a thinker or, if it is one of several
    models, of all of them: the `others` are carried through exports.
    """
    if not (part := fields.take(pictures.PART, "")):
        return tuple(rows)
    named = dense.rename(rows, {name: part + name for name in ("model.", "lm_head.")})
    why = "of a model that speaks, which is not trained"
    return (*named, *(Ignore(f"{other}.*", why, carried=True) for other in others))


def find_prefix(config: Mapping[str, Any]) -> str:
    """What names of tensors of the model that is trained begin with; "" if it is alone."""
    part = _find_part(config)
    return part and f"{part}."


def take_part(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the model that is trained."""
    if not (part := _find_part(config)):
        return config
    own = {n: v for n, v in config[f"{part}_config"].items() if n not in ("architectures", SECTION)}
    kind = {"model_type": f"{config['model_type']}_{part}"}
    return own | kind | {name: config[name] for name in _OF_ALL if name in config}


def override_part(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """All fields, those of the model that is trained with the values of `overrides`."""
    if not (part := _find_part(config)):
        return config | dict(overrides)
    section = f"{part}_config"
    return config | {section: config[section] | dict(overrides)}


def _find_part(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    part = _PARTS.get(kind, "") if isinstance(kind, str) else ""
    return part if isinstance(config.get(f"{part}_config"), Mapping) else ""
