"""LFM2 with experts on all layers but the first ones, chosen by corrected sigmoid scores."""

from __future__ import annotations

from megatron_policy.converters.architecture import Activation, Architecture, Moe, Scoring
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import lfm2
from megatron_policy.converters.families.shared import dense, experts
from megatron_policy.converters.rows import Ignore, Row

_BLOCK = "feed_forward"
TABLE: tuple[Row | Ignore, ...] = (
    *lfm2.TABLE,
    *experts.routed(_BLOCK, ("w1", "w3", "w2")),
    experts.correction_bias(f"{_BLOCK}.expert_bias"),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture an Lfm2MoeConfig describes."""
    fields.expect("hidden_act", ("silu", "swish"), "MLPs and experts have SiLU")
    fields.expect("attention_dropout", (0, 0.0), "transformers has no dropout in LFM2")
    moe = Moe(
        experts=experts.take_experts(fields, "num_experts", "num_local_experts"),
        chosen=fields.take("num_experts_per_tok"),
        ffn_hidden_size=fields.take("moe_intermediate_size"),
        scoring=Scoring.SIGMOID,
        renormalized=fields.take("norm_topk_prob"),
        added_to_sum=1e-6,
        scale=float(fields.take("routed_scaling_factor")),
        correction_bias=fields.take("use_expert_bias"),
    )
    layers = experts.take_layers_after_dense(fields, "num_dense_layers")
    mlp = dense.take_mlp(fields, activation=Activation.SILU)
    feeds = experts.place(fields, moe, layers, mlp=mlp)
    return dense.architecture(fields, lfm2.take_mixers(fields), feeds, epsilon="norm_eps")
