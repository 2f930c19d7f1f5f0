"""Qwen3-VL-MoE: Qwen3-VL with experts on all layers, or on some, stacked in two tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_policy.converters.architecture import Architecture, Moe, Scoring
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts, pictures
from megatron_policy.converters.rows import Ignore, Row, Whole, assign_part
from megatron_policy.converters.rows.expert_rows import (
    INPUTS_FIRST,
    StackedGateAboveUp,
    StackedInputs,
)

from . import qwen3_vl

_H = "model.language_model.layers.{layer}.mlp."


def _stacks(**order: Any) -> tuple[Row, ...]:
    """The rows of experts, in one order of their dimensions."""
    first, last = (experts.EXPERT + name for name in ("linear_fc1.weight", "linear_fc2.weight"))
    dims = ("hidden_size", "ffn_hidden_size")
    return (
        StackedGateAboveUp(first, (_H + "experts.gate_up_proj",), dims[:1], **order),
        StackedInputs(last, (_H + "experts.down_proj",), dims, **order),
    )


TABLE: tuple[Row | Ignore, ...] = (
    *qwen3_vl.TABLE,
    *assign_part(
        Moe,
        Whole(dense.M + "mlp.router.weight", (_H + "gate.weight",), ("experts", "hidden_size")),
    ),
    *_stacks(transposed=False, when="!" + INPUTS_FIRST),
    *_stacks(transposed=True, when=INPUTS_FIRST),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3VLMoeConfig describes. Its class always makes the weights of the
    chosen experts add up to 1. What transformers 4 saved has inputs of experts before outputs; the
    shapes of a checkpoint's tensors tell better, where they are known.
    """
    release = str(fields.take("transformers_version", ""))
    text = pictures.take_text(fields)
    text.ignore("norm_topk_prob", "the class always does so")
    moe = replace(
        experts.take_softmax_moe(text),
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
        inputs_first=release.startswith("4."),
    )
    feed = experts.place(text, moe, experts.take_sparse_layers(text))
    return dense.architecture(
        text, qwen3_vl.take_attention(text), feed, **pictures.take_shell(fields, "model.")
    )
