"""Qwen3.5's text model: Qwen3-Next's layers with dense MLPs and other projections of delta nets.

Its rotary embedding has three grids of positions, which are equal for text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_policy.converters.architecture import Architecture, Feed, Norm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import qwen3_next
from megatron_policy.converters.families.shared import dense, mtp, recurrences
from megatron_policy.converters.rows import Ignore, Row


def make_table(feeds: Iterable[Row | Ignore]) -> tuple[Row | Ignore, ...]:
    """The rows of a model whose layers have these rows of what tokens pass through."""
    feeds = tuple(feeds)
    return (
        *dense.ENDS,
        *qwen3_next.ATTENTION,
        *feeds,
        *recurrences.rows_of_delta_net(by_key_heads=False),
        *mtp.layers((*qwen3_next.ATTENTION, *feeds), qwen3_next.MTP_NAMES),
    )


TABLE: tuple[Row | Ignore, ...] = make_table(dense.MLP)
OTHER_NAMES = tuple(
    (f"model.{part}.", f"model.language_model.{part}.")
    for part in ("embed_tokens", "layers", "norm")
)
"""What transformers makes of names when it saves a text model that it took out of a whole one."""


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3_5TextConfig describes."""
    return make_architecture(fields, dense.take_mlp(fields))


def make_architecture(fields: Fields, feed: Feed, **shell: Any) -> Architecture:
    """The architecture of such a model, all of whose layers have this feed. `shell` is what it has
    of a model that also sees pictures, and gives tokens three positions.
    """
    if shell:
        mixers = qwen3_next.take_mixers(fields, threefold="alternating")
    else:
        if (rope := fields.section("rope_parameters")) is not None:
            for name in ("mrope_section", "mrope_interleaved"):
                rope.ignore(name, "the grids of positions are equal for text")
        mixers = qwen3_next.take_mixers(fields)
    fields.expect("attn_output_gate", (True,), "attention has gates")
    fields.expect("mtp_use_dedicated_embeddings", (False,), "layers share the embedding")
    fields.ignore("mamba_ssm_dtype", "states have fp32")
    further = fields.take("mtp_num_hidden_layers", 1)
    if further not in (0, 1):
        fields.refuse("mtp_num_hidden_layers", further, "checkpoints have one such layer at most")
    traits: dict[str, Any] = {"norm": Norm.RMS_PLUS_ONE, "further_layers": int(bool(further))}
    return dense.architecture(fields, mixers, feed, **traits, **shell)
