"""Granite 3 with experts, which files stack, in every layer: Granite's factors and attention."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Moe, Scoring
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import granite
from megatron_policy.converters.families.shared import dense, experts
from megatron_policy.converters.families.shared.dense import H, M
from megatron_policy.converters.rows import Ignore, Row, Whole, assign_part
from megatron_policy.converters.rows.expert_rows import StackedGateAboveUp, StackedInputs

_MIXTURE = H + "block_sparse_moe."
ATTENTION = (*dense.ENDS, *dense.NORMS, *dense.ATTENTION, *dense.ATTENTION_BIAS)
EXPERTS = assign_part(
    Moe,
    Whole(M + "mlp.router.weight", (_MIXTURE + "router.layer.weight",), ("experts", "hidden_size")),
    StackedGateAboveUp(
        experts.EXPERT + "linear_fc1.weight",
        (_MIXTURE + "input_linear.weight",),
        ("hidden_size",),
    ),
    StackedInputs(
        experts.EXPERT + "linear_fc2.weight",
        (_MIXTURE + "output_linear.weight",),
        ("hidden_size", "ffn_hidden_size"),
    ),
)
TABLE: tuple[Row | Ignore, ...] = (*ATTENTION, *EXPERTS)
PATHS = tuple(
    (f".block_sparse_moe.{name}_linear", f".block_sparse_moe.experts.{path}_proj")
    for name, path in (("input", "gate_up"), ("output", "down"))
)
"""Parts of names of tensors, and the paths of transformers' parameters in their place."""


def architecture(fields: Fields) -> Architecture:
    """The architecture a GraniteMoeConfig describes."""
    return dense.architecture(
        fields,
        granite.take_attention(fields),
        experts.place(fields, take_moe(fields)),
        **granite.take_factors(fields),
    )


def take_moe(fields: Fields, shared_ffn_hidden_size: int = 0) -> Moe:
    """The experts, of which the chosen ones' scores are renormalised."""
    return Moe(
        experts=fields.take("num_local_experts"),
        chosen=fields.take("num_experts_per_tok"),
        ffn_hidden_size=fields.take("intermediate_size"),
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
        shared_ffn_hidden_size=shared_ffn_hidden_size,
    )
