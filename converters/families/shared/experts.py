"""What families with mixtures of experts share: rows of routers and experts, and their fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import cast

from megatron_policy.converters.architecture import Feed, Mlp, Moe, Scoring
from megatron_policy.converters.architecture.layer import check_number
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.rows import GateUp, Role, Row, RowBase, Rows, Whole, assign_part
from megatron_policy.converters.rows.expert_rows import STACKED, StackedGateAboveUp, StackedInputs

from .dense import H, M, take_mlp

EXPERT = M + "mlp.experts.local_experts.{expert}."
SHARED = M + "mlp.shared_experts."


def correction_bias(name: str) -> Whole:
    """The row of the bias that affects which experts are chosen; `name` is HF's, within a layer."""
    return Whole(
        M + "mlp.router.expert_bias",
        (H + name,),
        ("experts",),
        part=Moe,
        when="correction_bias",
        role=Role.BIAS,
        keeps_dtype=True,
        learnt=False,
    )


CORRECTION_BIAS = correction_bias("mlp.gate.e_score_correction_bias")


def routed(
    block: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Row, ...]:
    """Rows of a router and its experts, which HF keeps as separate tensors.

    `block` is HF's name of a layer's mixture, `names` an expert's gate, up and down projections.
    """
    gate, up, down = (f"{H}{block}.experts.{{expert}}.{name}.weight" for name in names)
    router = f"{H}{block}.gate.weight"
    return assign_part(
        Moe,
        Whole(M + "mlp.router.weight", (router,), ("experts", "hidden_size")),
        GateUp(EXPERT + "linear_fc1.weight", (gate, up), ("ffn_hidden_size", "hidden_size")),
        Rows(EXPERT + "linear_fc2.weight", (down,), ("hidden_size", "ffn_hidden_size")),
    )


def routed_or_stacked() -> tuple[Row, ...]:
    """Rows of a router and its experts, which HF keeps as separate tensors or, in other
    checkpoints, in one of all experts, each gate above its up projection.
    """
    router, *apart = routed()
    gate_up, down = (f"{H}mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    return (
        router,
        *(replace(row, when="!" + STACKED) for row in cast(list[RowBase], apart)),
        StackedGateAboveUp(
            EXPERT + "linear_fc1.weight", (gate_up,), ("hidden_size",), when=STACKED
        ),
        StackedInputs(
            EXPERT + "linear_fc2.weight",
            (down,),
            ("hidden_size", "ffn_hidden_size"),
            when=STACKED,
        ),
    )


def shared(name: str) -> tuple[Row, ...]:
    """Rows of the shared MLP that every token also passes through, which HF calls `name`."""
    return assign_part(
        Moe,
        GateUp(
            SHARED + "linear_fc1.weight",
            (f"{H}mlp.{name}.gate_proj.weight", f"{H}mlp.{name}.up_proj.weight"),
            ("shared_ffn_hidden_size", "hidden_size"),
            when="shared_ffn_hidden_size",
        ),
        Rows(
            SHARED + "linear_fc2.weight",
            (f"{H}mlp.{name}.down_proj.weight",),
            ("hidden_size", "shared_ffn_hidden_size"),
            when="shared_ffn_hidden_size",
        ),
        Whole(
            SHARED + "gate_weight",
            (f"{H}mlp.{name}_gate.weight",),
            ("shared_gates", "hidden_size"),
            when="shared_gate",
        ),
    )


def place(
    fields: Fields,
    moe: Moe,
    layers: Sequence[bool] | None = None,
    *,
    mlp: Mlp | None = None,
    balancing: str = "router_aux_loss_coef",
) -> Feed | list[Feed]:
    """What each token passes through: `moe` in the marked layers, by default in all, elsewhere
    `mlp`, by default `dense.take_mlp(fields)`, whose activation function and biases experts have.

    `balancing` is the name of the field with the coefficient of the load balancing loss.
    """
    fields.ignore("output_router_logits", "part of Hugging Face's own loss, which is not used here")
    if balancing != "router_aux_loss_coef":
        fields.ignore("router_aux_loss_coef", f"the makers' own is {balancing}")
    found = fields.take(balancing, None)
    if found is not None and (type(found) not in (int, float) or not 0 <= found < inf):
        fields.refuse(balancing, found, "must be a finite number of at least 0")
    mlp = mlp or take_mlp(fields)
    moe = replace(moe, aux_loss_coeff=found, activation=mlp.activation, mlp_bias=mlp.mlp_bias)
    return moe if layers is None else [moe if marked else mlp for marked in layers]


def take_experts(fields: Fields, *names: str) -> int:
    """The number of experts, whose field name differs between releases of transformers."""
    found = {name: value for name in names if (value := fields.take(name, None)) is not None}
    for name, value in found.items():
        if value != next(iter(found.values())):
            fields.refuse(name, value, f"contradicts {next(iter(found))}; remove the wrong one")
    return next(iter(found.values())) if found else int(fields.take(names[0]))


def take_softmax_moe(
    fields: Fields, *, width: str = "moe_intermediate_size", shared_ffn_hidden_size: int = 0
) -> Moe:
    """The mixture of the Qwen families: softmax scores, renormalised or not.

    `width` is the name of the field with an expert's inner channels.
    """
    renormalized = fields.take("norm_topk_prob", False)
    return Moe(
        experts=take_experts(fields, "num_experts", "num_local_experts"),
        chosen=fields.take("num_experts_per_tok"),
        ffn_hidden_size=fields.take(width),
        scoring=Scoring.SOFTMAX_OF_CHOSEN if renormalized else Scoring.SOFTMAX,
        shared_ffn_hidden_size=shared_ffn_hidden_size,
        shared_gate=bool(shared_ffn_hidden_size),
    )


def take_sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers of a Qwen model have experts: every n-th, without those listed as dense."""
    step, dense = fields.take("decoder_sparse_step", 1), fields.take("mlp_only_layers", ())
    if step < 1:
        fields.refuse("decoder_sparse_step", step, "every 1st, 2nd, ... layer has experts")
    number = fields.take("num_hidden_layers")
    check_number(number)
    return tuple(layer not in dense and (layer + 1) % max(step, 1) == 0 for layer in range(number))


def take_sigmoid_moe(fields: Fields) -> Moe:
    """The mixture of DeepSeek-V3 and GLM-4.5: sigmoid scores, corrected to choose from groups."""
    fields.expect("scoring_func", ("sigmoid",), "scores are sigmoids of the router's logits")
    fields.expect("topk_method", ("noaux_tc",), "experts are chosen by corrected scores")
    width = fields.take("moe_intermediate_size")
    return Moe(
        experts=take_experts(fields, "n_routed_experts"),
        chosen=fields.take("num_experts_per_tok"),
        ffn_hidden_size=width,
        scoring=Scoring.SIGMOID,
        renormalized=fields.take("norm_topk_prob", False),
        scale=float(fields.take("routed_scaling_factor")),
        groups=fields.take("n_group", 1),
        groups_chosen=fields.take("topk_group", 1),
        correction_bias=True,
        shared_ffn_hidden_size=width * fields.take("n_shared_experts"),
    )


def take_layers_after_dense(
    fields: Fields, name: str = "first_k_dense_replace"
) -> tuple[bool, ...]:
    """Which layers have experts when the first are dense: the field `name` says how many."""
    fields.expect("moe_layer_freq", (1,), "every layer after the first dense ones has experts")
    first, number = fields.take(name, 0), fields.take("num_hidden_layers")
    check_number(number)
    return tuple(layer >= first for layer in range(number))
