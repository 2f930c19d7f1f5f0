"""What families share whose models also see pictures: the decoder's section of the config, and what
surrounds it, which transformers' own class computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from megatron_policy.converters.architecture import Medium, PatchMedium, Shell
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.rows import Role, Row, TowerQkv, Whole
from megatron_policy.errors import ConversionError

PARAMETERS = "embedding.shell."
"""What the names of the shell's parameters begin with, beside the embedding of the first stage."""

TENSORS = "shell"
"""The field that a config has beside those of its file: the tensors of what surrounds the decoder,
name and shape.
"""
UNREAD = "unread"
"""The field that a config has beside those of its file: fields of sections for towers that nothing
reads, each with its value and why it is refused.
"""
PART = "part"
"""The field that a config has beside those of its file if it is the section of one model in a
checkpoint of several: what names of that model's tensors begin with.
"""
BY_CLASS = "read by transformers' own class of what surrounds the decoder"
_FIRST = "patch_embed.proj.weight"
"""The end of the name of what a tower multiplies patches with, `[features, ...]`."""
_STATISTICS = (".running_mean", ".running_var")
"""The ends of names of what a tower has measured before."""
_MARKS = ("vision_start_token_id", "vision_end_token_id", "vision_token_id")
_REPEATED = (
    *_MARKS,
    *("image_token_id", "image_start_token_id", "image_end_token_id"),
    *("video_token_id", "video_start_token_id", "video_end_token_id"),
)
"""Tokens that some releases of transformers state in the section of the decoder too."""


def take_text(fields: Fields) -> Fields:
    """The decoder's section."""
    text = fields.section("text_config", inherited=("tie_word_embeddings",))
    if text is None:
        raise ConversionError("config.json has no text_config, which this model family needs")
    for name in _REPEATED:
        text.ignore(name, "the fields of the whole model count")
    return text


def take_shell(
    fields: Fields,
    prefix: str,
    marks: tuple[str, ...] = _MARKS,
    videos: str = "video_token_id",
    **more: Any,
) -> dict[str, Any]:
    """What `Architecture` says of pictures, and of videos, whose placeholder is the field `videos`,
    and `more` as `take_media` has it: by default other tokens stand between their frames. Tensors
    of the shell have names with this `prefix` in a checkpoint. The fields `marks` are tokens around
    pictures.
    """
    for name in marks:
        fields.ignore(name, BY_CLASS)
    image, *other = take_tokens(fields, *dict.fromkeys(("image_token_id", videos)))
    media, deep = take_media(fields, image, *(other or [image]), **{"by_frame": True} | more)
    return surround(fields, prefix, *media, deep=deep)


def take_tokens(fields: Fields, *names: str) -> list[int]:
    """What these fields have: placeholders and tokens before them, each another one. The first,
    that of pictures, is a token of the decoder's vocabulary; what others have beyond it, no row of
    a batch can have.
    """
    tokens = [fields.take(name) for name in names]
    size = fields.take("text_config")["vocab_size"]
    if not isinstance(tokens[0], int) or not 0 <= tokens[0] < size:
        fields.refuse(names[0], tokens[0], f"the vocabulary has {size} tokens, numbered from 0")
    for number, (name, token) in enumerate(zip(names, tokens, strict=True)):
        if (first := tokens.index(token)) != number:
            why = f"{names[first]} is the same token, so that nothing tells them apart"
            fields.refuse(name, token, why)
    return tokens


def take_media(
    fields: Fields, image: int, videos: int, **more: Any
) -> tuple[list[PatchMedium], int]:
    """Pictures and videos, whose placeholders these tokens are, and how many layers of the decoder
    have features added to what they return. `more` are further fields of the `PatchMedium` of
    videos, of which pictures have `start`.
    """
    vision = fields.take("vision_config")
    first = (shape for name, shape in fields.take(TENSORS).items() if name.endswith(_FIRST))
    merged, patch = vision["spatial_merge_size"] ** 2, (prod(next(first)[1:]),)
    start = more.get("start")
    still = PatchMedium(
        image, "pixel_values", merged, "image_grid_thw", patch, still=True, start=start
    )
    films = PatchMedium(videos, "pixel_values_videos", merged, "video_grid_thw", patch, **more)
    return [still, films], len(vision.get("deepstack_visual_indexes") or ())


def surround(fields: Fields, prefix: str, *media: Medium, **more: Any) -> dict[str, Any]:
    """What `Architecture` says of a shell that reads these media; tensors of it have names with the
    `prefix` in a checkpoint.
    """
    for name, (value, why) in fields.take(UNREAD, {}).items():
        fields.refuse(name, value, why)
    tensors = tuple((name, tuple(shape)) for name, shape in fields.take(TENSORS).items())
    shell = Shell(tensors, prefix, media, **more)
    return {"shell": shell, "attachments": shell.attachments}


def make_rows(shell: Shell) -> tuple[Whole, ...]:
    """The rows of the shell's tensors, which every rank of the first stage holds whole."""
    return tuple(
        Whole(
            PARAMETERS + name,
            (shell.prefix + name,),
            shape,
            role=_role_of(name, shape),
            learnt=not name.endswith(_STATISTICS),
        )
        for name, shape in shell.tensors
    )


def name_on_file(
    shell: Shell, names: Iterable[tuple[str, str]], projections: tuple[str, ...], joined: str
) -> tuple[Row, ...]:
    """The rows of the shell's tensors by the names on file, where `names` has what takes the place
    of parts of theirs, one after another. Three `projections` are one tensor there, `joined`.
    """

    def spell(name: str) -> str:
        for part, other in names:
            name = name.replace(part, other)
        return name

    rows: list[Row] = []
    for row in make_rows(shell):
        (name,) = row.hf
        number = next((n for n, each in enumerate(projections) if each in name), None)
        if number is None:
            rows.append(replace(row, hf=(spell(name),)))
        else:
            named = replace(row, hf=(spell(name.replace(projections[number], joined)),))
            turned = shell.heads * (number < 2)
            rows.append(TowerQkv(**vars(named), number=number, heads=turned))
    return tuple(sorted(rows, key=lambda row: row.hf))


def _role_of(name: str, shape: tuple[int, ...]) -> Role:
    if len(shape) > 1:
        return Role.MATRIX
    return Role.BIAS if name.endswith("bias") else Role.NORM
