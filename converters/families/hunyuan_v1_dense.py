"""Hunyuan (dense): llama with QK norm after the rotary embedding, whose base a constant widens."""

from __future__ import annotations

from dataclasses import replace

from megatron_policy.converters.architecture import Architecture, Attention, QkNorm, Rope
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense
from megatron_policy.converters.families.shared.dense import H, M
from megatron_policy.converters.rows import Ignore, Role, Row, Whole

_CORE = M + "self_attention.core_attention."
TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *dense.BLOCK,
    *dense.ATTENTION_BIAS,
    *(
        Whole(
            f"{_CORE}{name[0]}_layernorm.weight",
            (f"{H}self_attn.{name}_layernorm.weight",),
            ("kv_channels",),
            part=Attention,
            role=Role.NORM,
        )
        for name in ("query", "key")
    ),
)

_SPECIAL_TOKENS = (
    *("eod_token", "im_end", "im_newline", "im_start", "mask_init", "pad", "sep_token"),
    *("text_end", "text_start"),
)
_CLASSIFIER = ("add_classification_head", "class_num", "dense_list", "pool_type")


def architecture(fields: Fields) -> Architecture:
    """The architecture a HunYuanDenseV1Config describes."""
    fields.ignore("pretraining_tp", "only the order of summation in pretraining")
    fields.ignore("attention_head_dim", "transformers uses head_dim")
    fields.ignore("org_vocab_size", "counts the tokens that the tokenizer has")
    for name in _SPECIAL_TOKENS:
        fields.ignore(f"{name}_id", "belongs to the tokenizer")
    for name in _CLASSIFIER:
        fields.ignore(name, "of a classification head, which this model lacks")
    fields.ignore("cla_share_factor", "use_cla is false")
    fields.expect("use_cla", (False,), "layers do not share keys and values")
    fields.expect("use_qk_norm", (True,), "transformers always normalises queries and keys")
    fields.expect("mlp_bias", (False,), "transformers has no biases in Hunyuan's MLPs")
    fields.expect("norm_type", ("rms",), "norms are RMS norms")
    bias = fields.take("attention_bias", False)
    attention = dense.take_attention(fields, bias=bias, qk_norm=QkNorm.AFTER_ROTATION)
    if (alpha := _take_alpha(fields)) is not None:
        # The base of the unscaled rotary embedding is wider by a power of `alpha`.
        size = attention.kv_channels
        base = take_rope(fields).base * alpha ** (size / (size - 2))
        attention = replace(attention, rope=Rope(base))
    return dense.architecture(fields, attention)


def _take_alpha(fields: Fields) -> float | None:
    """The constant that replaces dynamic scaling; None if there is none."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    alpha = section.take("alpha", None) if section else None
    if not section or not alpha:
        return None
    if section.take("rope_type", section.take("type", "default")) != "dynamic":
        section.refuse("alpha", alpha, "needs rope_type dynamic")
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        section.ignore(name, "alpha takes precedence")
    return float(alpha)
