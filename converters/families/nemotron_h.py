"""Nemotron-H and Nemotron 3: layers of one part each, Mamba2, attention without a rotary embedding,
an MLP or experts, whose activation function is the square of ReLU.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import (
    Activation,
    Architecture,
    Attention,
    Feed,
    LayerPart,
    Mamba2,
    Mixer,
    Mlp,
    Moe,
    Scoring,
    stack,
)
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts, mtp, recurrences
from megatron_policy.converters.families.shared.dense import H, M
from megatron_policy.converters.rows import Columns, Ignore, Role, Row, Rows, Whole, assign_part

_PARTS: dict[type[LayerPart], str] = {
    Mamba2: "input_layernorm",
    Attention: "input_layernorm",
    Mlp: "pre_mlp_layernorm",
    Moe: "pre_mlp_layernorm",
}
_FC1, _FC2 = "linear_fc1.weight", "linear_fc2.weight"
_NAMES = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.layers.": "backbone.layers.",
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
}


def _rows_of_experts() -> tuple[Row, ...]:
    """Rows of experts without gates, which can read and give narrower vectors."""
    up, down = (f"{H}mlp.experts.{{expert}}.{name}_proj.weight" for name in ("up", "down"))
    shared_up, shared_down = (
        f"{H}mlp.shared_experts.{name}_proj.weight" for name in ("up", "down")
    )
    first, last, shared = experts.EXPERT + _FC1, experts.EXPERT + _FC2, "shared_ffn_hidden_size"
    into, out = "mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight"
    return assign_part(
        Moe,
        Whole(M + "mlp.router.weight", (H + "mlp.gate.weight",), ("experts", "hidden_size")),
        experts.CORRECTION_BIAS,
        Columns(first, (up,), ("ffn_hidden_size", "hidden_size"), when="!latent_size"),
        Rows(last, (down,), ("hidden_size", "ffn_hidden_size"), when="!latent_size"),
        Columns(first, (up,), ("ffn_hidden_size", "latent_size"), when="latent_size"),
        Rows(last, (down,), ("latent_size", "ffn_hidden_size"), when="latent_size"),
        Whole(M + into, (H + into,), ("latent_size", "hidden_size"), when="latent_size"),
        Whole(M + out, (H + out,), ("hidden_size", "latent_size"), when="latent_size"),
        Columns(experts.SHARED + _FC1, (shared_up,), (shared, "hidden_size"), when=shared),
        Rows(experts.SHARED + _FC2, (shared_down,), ("hidden_size", shared), when=shared),
    )


_MTP_NAMES = mtp.Names(
    held="mtp.layers.",
    left_out="mtp.layers.",
    embedding_norm="0.enorm.weight",
    hidden_norm="0.hnorm.weight",
    projection="0.eh_proj.weight",
    final_norm="1.final_layernorm.weight",
    layer="mtp.layers.{mtp}.",
    feed="mtp.layers.1.",
)
"""A layer that predicts further tokens is two here: attention, and experts."""
_NORMS = tuple(
    Whole(f"{M}{norm}.weight", (H + "norm.weight",), ("hidden_size",), part=part, role=Role.NORM)
    for part, norm in _PARTS.items()
)
_PREDICTING = (
    *(norm for norm in _NORMS if norm.part in (Attention, Moe)),
    *dense.ATTENTION,
    *_rows_of_experts(),
)
PATHS = (("backbone.", "model."),)
TABLE: tuple[Row | Ignore, ...] = dense.rename(
    (
        *dense.ENDS,
        *_NORMS,
        *dense.ATTENTION,
        *dense.ungated_mlp("up_proj", "down_proj"),
        *_rows_of_experts(),
        *recurrences.rows_of_mamba2("mixer"),
        *mtp.layers(_PREDICTING, _MTP_NAMES),
    ),
    _NAMES,
)
_PREDICTED = ["full_attention", "moe"]
_OF_HUGGING_FACE = (
    "chunk_size",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "num_logits_to_keep",
    "use_mamba_kernels",
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a NemotronHConfig describes."""
    _expect_plain(fields)
    mlp = Mlp(
        ffn_hidden_size=fields.take("intermediate_size"),
        activation=Activation.SQUARED_RELU,
        gated=False,
    )
    heads = fields.take("num_attention_heads")
    attention = Attention(
        num_attention_heads=heads,
        num_query_groups=fields.take("num_key_value_heads", heads),
        kv_channels=fields.take("head_dim"),
        rope=None,
        attention_dropout=fields.take("attention_dropout", 0.0),
    )
    mamba2 = Mamba2(
        num_heads=fields.take("mamba_num_heads"),
        head_dim=fields.take("mamba_head_dim"),
        groups=fields.take("n_groups"),
        state_size=fields.take("ssm_state_size"),
        taps=fields.take("conv_kernel"),
        conv_bias=fields.take("use_conv_bias"),
        **recurrences.take_step_limits(fields),
    )
    kinds: dict[str, tuple[Mixer | None, Feed | None]] = {
        "linear_attention": (mamba2, None),
        "full_attention": (attention, None),
        "mlp": (None, mlp),
        "moe": (None, _take_moe(fields)),
    }
    parts = recurrences.take_layers(fields, "layers_block_type", kinds, recurrences.OLDER_KINDS)
    used = {feed for _, feed in parts}
    return Architecture(
        layers=stack(len(parts), [mixer for mixer, _ in parts], [feed for _, feed in parts]),
        hidden_size=fields.take("hidden_size"),
        vocab_size=fields.take("vocab_size"),
        max_position_embeddings=fields.take("max_position_embeddings"),
        layernorm_epsilon=fields.take("layer_norm_epsilon"),
        tied=False,
        unused_ffn_hidden_size=0 if mlp in used else mlp.ffn_hidden_size,
        further_layers=_count_predicting(fields, any(isinstance(feed, Moe) for feed in used)),
    )


def _count_predicting(fields: Fields, has_experts: bool) -> int:
    """How many layers that predict further tokens checkpoints have, of a model with or without
    experts in its other layers.
    """
    fields.ignore("mtp_hybrid_override_pattern", "mtp_layers_block_type states it")
    count = mtp.take_layers(fields)
    if count > 1:
        fields.refuse("num_nextn_predict_layers", count, "checkpoints have one such layer at most")
    kinds = fields.take("mtp_layers_block_type", _PREDICTED)
    named = [recurrences.OLDER_KINDS.get(kind, kind) for kind in kinds]
    if count and not (has_experts and named == _PREDICTED):
        why = "a layer that predicts further tokens is attention, and experts as other layers have"
        fields.refuse("mtp_layers_block_type", kinds, why)
    return count


def _expect_plain(fields: Fields) -> None:
    """What no layer has, and what only says how Hugging Face computes."""
    for name in ("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"):
        fields.expect(name, (False,), "linear layers have no biases")
    fields.expect("residual_in_fp32", (False,), "the residual stream has the model's precision")
    fields.expect("tie_word_embeddings", (False,), "the head has weights of its own")
    fields.expect("mlp_hidden_act", ("relu2",), "the MLP's activation is the square of ReLU")
    fields.expect("mamba_hidden_act", ("silu", "swish"), "Mamba2 has it")
    fields.expect("n_shared_experts", (1,), "experts have a shared MLP beside them")
    fields.expect("hidden_dropout", (0, 0.0), "no dropout is applied")
    if (window := fields.take("sliding_window", None)) is not None:
        fields.refuse("sliding_window", window, "no layer has a window")
    for name in _OF_HUGGING_FACE:
        fields.ignore(name, "how Hugging Face computes and generates")
    for name in ("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"):
        fields.ignore(name, "weights are loaded; time_step_limit says how long steps can be")
    for name in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"):
        fields.ignore(name, "no layer has a rotary embedding")
    for name in ("hybrid_override_pattern", "num_hidden_layers"):
        fields.ignore(name, "layers_block_type states every layer")
    fields.ignore("expand", "heads and their size are given")
    fields.ignore("hidden_act", "MLPs and Mamba2 have fields of their own for it")
    fields.ignore("auto_map", "the makers' own code, which transformers' class replaces")
    fields.ignore("output_router_logits", "part of Hugging Face's own loss, which is not used here")


def _take_moe(fields: Fields) -> Moe:
    return Moe(
        experts=experts.take_experts(fields, "n_routed_experts", "num_local_experts"),
        chosen=fields.take("num_experts_per_tok"),
        ffn_hidden_size=fields.take("moe_intermediate_size"),
        scoring=Scoring.SIGMOID,
        renormalized=fields.take("norm_topk_prob"),
        scale=float(fields.take("routed_scaling_factor")),
        groups=fields.take("n_group"),
        groups_chosen=fields.take("topk_group"),
        correction_bias=True,
        shared_ffn_hidden_size=fields.take("moe_shared_expert_intermediate_size"),
        activation=Activation.SQUARED_RELU,
        gated=False,
        latent_size=fields.take("moe_latent_size", None) or 0,
    )
