"""Kimi Linear: delta nets whose channels decay by themselves, latent attention without a rotary
embedding on some layers, and DeepSeek-V3's experts.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import (
    Architecture,
    ChannelDeltaNet,
    Feed,
    Mixer,
    Mla,
    Moe,
    Scoring,
    stack,
)
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts, mla, recurrences
from megatron_policy.converters.rows import Ignore, Row

_BLOCK = "block_sparse_moe"
TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *dense.NORMS,
    *mla.ATTENTION,
    *recurrences.rows_of_channel_delta_net("self_attn"),
    *dense.MLP,
    *experts.routed(_BLOCK, ("w1", "w3", "w2")),
    experts.correction_bias(f"{_BLOCK}.gate.e_score_correction_bias"),
    *dense.rename(experts.shared("shared_experts"), {"mlp.shared": f"{_BLOCK}.shared"}),
)
OTHER_NAMES = ((".mlp.", f".{_BLOCK}."),)
"""What releases of transformers make of the names of MLPs when they save them."""
PATHS = (
    (".self_attn.f_", ".self_attn.forget_gate.f_"),
    (".block_sparse_moe.shared_experts.", ".mlp.shared_experts."),
)
"""Parts of names of tensors, and what the paths of transformers' modules have in their place."""
_STATED = {
    "first_k_dense_replace": "mlp_layer_types states it for each layer",
    "head_dim": "the parts of heads have fields of their own",
    "linear_attn_config": "layer_types and other fields state it",
    "pretraining_tp": "how Hugging Face computes",
    "qk_head_dim": "the sum of qk_nope_head_dim and qk_rope_head_dim",
}


def architecture(fields: Fields) -> Architecture:
    """The architecture a KimiLinearConfig describes."""
    for name, why in _STATED.items():
        fields.ignore(name, why)
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        fields.ignore(name, "no layer has a rotary embedding")
    fields.ignore("auto_map", "the makers' own code, which transformers' class replaces")
    fields.expect("mla_use_nope", (True,), "no layer has a rotary embedding")
    fields.expect("hidden_act", ("silu", "swish"), "delta nets and MLPs have it")
    fields.expect("tie_word_embeddings", (False,), "the head has weights of its own")
    fields.expect(
        "num_nextn_predict_layers", (0,), "layers that predict further tokens have no rows"
    )
    mixers: dict[str, Mixer] = {
        "full_attention": _take_attention(fields),
        "linear_attention": ChannelDeltaNet(
            num_heads=fields.take("linear_num_heads"),
            head_dim=fields.take("linear_head_dim"),
            taps=fields.take("linear_conv_kernel_dim"),
        ),
    }
    mlp = dense.take_mlp(fields)
    moe = experts.place(fields, _take_moe(fields), mlp=mlp)
    assert isinstance(moe, Moe)
    feeds: dict[str, Feed] = {"sparse": moe, "dense": mlp}
    layers = stack(
        fields.take("num_hidden_layers"),
        recurrences.take_layers(fields, "layer_types", mixers),
        recurrences.take_layers(fields, "mlp_layer_types", feeds),
    )
    return Architecture(
        layers=layers,
        hidden_size=fields.take("hidden_size"),
        vocab_size=fields.take("vocab_size"),
        max_position_embeddings=fields.take("model_max_length", None)
        or fields.take("max_position_embeddings"),
        layernorm_epsilon=fields.take("rms_norm_eps"),
        tied=False,
    )


def _take_attention(fields: Fields) -> Mla:
    heads = fields.take("num_attention_heads")
    fields.expect("num_key_value_heads", (heads,), "every head has keys and values of its own")
    fields.expect("attention_bias", (False,), "Megatron-Core's latent attention has no biases")
    return Mla(
        num_attention_heads=heads,
        rope=None,
        q_lora_rank=fields.take("q_lora_rank", None),
        kv_lora_rank=fields.take("kv_lora_rank"),
        qk_nope_head_dim=fields.take("qk_nope_head_dim"),
        qk_rope_head_dim=fields.take("qk_rope_head_dim"),
        v_head_dim=fields.take("v_head_dim"),
        attention_dropout=fields.take("attention_dropout", 0.0),
    )


def _take_moe(fields: Fields) -> Moe:
    fields.expect("moe_layer_freq", (1,), "mlp_layer_types states it for each layer")
    fields.expect("moe_router_activation_func", ("sigmoid",), "scores are sigmoids of logits")
    fields.expect("topk_method", ("noaux_tc",), "experts are chosen by corrected scores")
    fields.expect("use_grouped_topk", (True,), "experts are chosen from groups")
    width = fields.take("moe_intermediate_size")
    return Moe(
        experts=fields.take("num_experts"),
        chosen=fields.take("num_experts_per_token"),
        ffn_hidden_size=width,
        scoring=Scoring.SIGMOID,
        renormalized=fields.take("moe_renormalize"),
        scale=float(fields.take("routed_scaling_factor")),
        groups=fields.take("num_expert_group"),
        groups_chosen=fields.take("topk_group"),
        correction_bias=True,
        shared_ffn_hidden_size=width * fields.take("num_shared_experts"),
    )
