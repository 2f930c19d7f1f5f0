"""Qwen3.5's text model with experts on all layers."""

from __future__ import annotations

from dataclasses import replace

from megatron_policy.converters.architecture import Architecture, Mlp, Moe, Scoring
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import qwen3_5_text
from megatron_policy.converters.families.shared import dense, experts

from .qwen3_5_text import OTHER_NAMES as OTHER_NAMES

TABLE = qwen3_5_text.make_table(
    (*experts.routed_or_stacked(), *experts.shared("shared_expert")),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3_5MoeTextConfig describes."""
    return qwen3_5_text.make_architecture(fields, take_feed(fields))


def take_feed(fields: Fields) -> Moe:
    """The experts of all layers."""
    fields.expect("norm_topk_prob", (True,), "weights of chosen experts are renormalised")
    width = fields.take("shared_expert_intermediate_size")
    moe = experts.take_softmax_moe(fields, shared_ffn_hidden_size=width)
    moe = replace(moe, scoring=Scoring.SOFTMAX_OF_CHOSEN)
    # No layer has such an MLP: experts have its activation function.
    mlp = Mlp(ffn_hidden_size=width, activation=dense.take_activation(fields, "hidden_act"))
    feed = experts.place(fields, moe, mlp=mlp)
    assert isinstance(feed, Moe)
    return feed
