"""ERNIE 4.5 with experts: chosen by corrected softmax scores, next to shared ones; heads rotated in
pairs of neighbours.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Moe, Scoring
from megatron_policy.converters.architecture.layer import check_number
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, experts
from megatron_policy.converters.families.shared.dense import H, M
from megatron_policy.converters.rows import Ignore, Reshaped, Role, Row

_PREDICTS = "of a layer that predicts a further token, which the model's logits do not need"
_MTP = (
    *("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight"),
    "model.mtp_linear_proj.0.weight",
    *(
        name.replace(H, "model.mtp_block.0.")
        for row in dense.BLOCK
        if not isinstance(row, Ignore)
        for name in row.hf
    ),
)
TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *dense.BLOCK,
    *experts.routed(),
    *experts.shared("shared_experts"),
    Reshaped(
        M + "mlp.router.expert_bias",
        (H + "mlp.moe_statics.e_score_correction_bias",),
        ("experts",),
        hf_dims=(1, "experts"),
        part=Moe,
        role=Role.BIAS,
        keeps_dtype=True,
        learnt=False,
    ),
    *(Ignore(name, _PREDICTS, carried=True) for name in _MTP),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture an Ernie4_5_MoeConfig describes."""
    fields.ignore("auto_map", "the makers' own code, which transformers replaces")
    fields.ignore("moe_capacity", "no expert's tokens are limited")
    fields.ignore("moe_use_aux_free", "every layer with experts has a correction bias")
    fields.expect("num_nextn_predict_layers", (0, 1), "checkpoints have one such layer at most")
    fields.expect("attention_dropout", (0.0,), "transformers has no dropout in ERNIE 4.5")
    fields.expect("use_bias", (False,), "it would add a bias to the output layer")
    for name, allowed in (("moe_gate", "topk"), ("moe_gate_act", "softmax")):
        fields.expect(name, (allowed,), "experts have the highest corrected softmax scores")
    width = fields.take("moe_intermediate_size")
    moe = Moe(
        experts=experts.take_experts(fields, "moe_num_experts", "num_experts"),
        chosen=fields.take("moe_k"),
        ffn_hidden_size=width,
        scoring=Scoring.SOFTMAX,
        renormalized=True,
        least_sum=float(fields.take("moe_norm_min", 1e-12)),
        correction_bias=True,
        shared_ffn_hidden_size=width * fields.take("moe_num_shared_experts", 0),
    )
    attention = dense.take_attention(fields, rope=take_rope(fields, interleaved=True))
    number, step = fields.take("num_hidden_layers"), fields.take("moe_layer_interval", 1)
    check_number(number)
    if step < 1:
        fields.refuse("moe_layer_interval", step, "every 1st, 2nd, ... layer has experts")
    first, last = fields.take("moe_layer_start_index", 0), fields.take("moe_layer_end_index", -1)
    last = number - 1 if last == -1 else last
    # Every n-th between the first and the last that can have experts has them.
    have_experts = tuple(
        first <= layer <= last and (layer + 1) % max(step, 1) == 0 for layer in range(number)
    )
    return dense.architecture(fields, attention, experts.place(fields, moe, have_experts))
