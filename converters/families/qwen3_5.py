"""Qwen3.5 as published: its text model, of the family qwen3_5_text, within one that also reads
pictures. The tower that reads them is left as it is: exports copy it, and nothing trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import qwen3_5_text
from megatron_policy.converters.families.shared import dense
from megatron_policy.converters.rows import Ignore, Row

_TOWER = "model.visual."
_BLOCK = _TOWER + "blocks.{block}."
_PARTS = (
    *(_TOWER + name for name in ("patch_embed.proj", "pos_embed")),
    *(f"{_TOWER}merger.{name}" for name in ("norm", "linear_fc1", "linear_fc2")),
    *(_BLOCK + name for name in ("norm1", "norm2", "attn.qkv", "attn.proj")),
    *(_BLOCK + name for name in ("mlp.linear_fc1", "mlp.linear_fc2")),
)
_UNREAD = "part of the tower that reads pictures, which a text model does not"
_TOKENS = (
    *("image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
)


def make_table(rows: Iterable[Row | Ignore]) -> tuple[Row | Ignore, ...]:
    """The rows of a text model within one that has a tower."""
    return (
        *dense.rename(rows, {"model.": "model.language_model."}),
        *(
            Ignore(f"{part}.{kind}", _UNREAD, carried=True)
            for part in _PARTS
            for kind in ("weight", "bias")
        ),
    )


TABLE: tuple[Row | Ignore, ...] = make_table(qwen3_5_text.TABLE)


def architecture(fields: Fields) -> Architecture:
    """The architecture of the text model of a Qwen3_5Config."""
    return take_text(fields, qwen3_5_text.architecture)


def take_text(fields: Fields, architecture: Callable[[Fields], Architecture]) -> Architecture:
    """The architecture of the text model within, which `architecture` takes from its own fields."""
    for name in _TOKENS:
        fields.ignore(name, "a token that stands for pictures, which are refused in batches")
    fields.ignore("language_model_only", "which part of the model an engine loads")
    fields.take("text_config")
    text, blocks = fields.section("text_config"), 0
    if (tower := fields.section("vision_config")) is not None:
        for name in fields.take("vision_config"):
            tower.ignore(name, "the tower is left as it is")
        blocks = tower.take("depth")
    assert text is not None
    found = architecture(text)
    text.ignore("tie_word_embeddings", "that of the whole model counts")
    return replace(found, tied=fields.take("tie_word_embeddings"), tower_blocks=blocks)
