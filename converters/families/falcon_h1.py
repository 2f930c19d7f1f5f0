"""Falcon-H1: attention and Mamba2 side by side on one norm, then an MLP, and factors on all three.

Factors on what attention and Mamba2 read are taken together with those on what these give.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_policy.converters.architecture import Architecture, Beside, Mamba2
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, recurrences
from megatron_policy.converters.rows import Ignore, Row

_NAMES = {
    "model.norm.": "model.final_layernorm.",
    "post_attention_layernorm": "pre_ff_layernorm",
    ".mlp.": ".feed_forward.",
}
TABLE: tuple[Row | Ignore, ...] = (
    *dense.rename((*dense.ENDS, *dense.BLOCK), _NAMES),
    *(row for row in recurrences.rows_of_mamba2("mamba") if row.when != "proj_bias"),
)
_BIASES = ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
_IGNORED = {
    "layers_block_type": "all layers are alike",
    "layer_types": "all layers are alike",
    "mamba_chunk_size": "it only affects rounding",
    "mamba_expand": "heads and their size are given",
    "mlp_expansion_factor": "intermediate_size has its value",
    "num_logits_to_keep": "how Hugging Face generates",
}


def architecture(fields: Fields) -> Architecture:
    """The architecture a FalconH1Config describes."""
    fields.expect("hidden_act", ("silu", "swish"), "Mamba2 and MLPs have it")
    fields.expect("mamba_use_mlp", (True,), "all layers have an MLP")
    for name in _BIASES:
        fields.expect(name, (False,), "linear layers have no biases")
    for name, why in _IGNORED.items():
        fields.ignore(name, why)
    if (some := fields.take("attn_layer_indices", None)) is not None:
        fields.refuse("attn_layer_indices", some, "all layers have attention")
    into, key = fields.take("attention_in_multiplier"), fields.take("key_multiplier")
    beside = Beside(
        _take_mamba2(fields),
        scale=float(fields.take("ssm_out_multiplier")),
        scale_of_first=float(fields.take("attention_out_multiplier")) * into,
    )
    gate, out = fields.take("mlp_multipliers")
    mlp = dense.take_mlp(fields, gate_factor=float(gate), out_factor=float(out))
    attention = dense.take_attention(fields, rope=take_rope(fields))
    return dense.architecture(
        fields,
        replace(attention, attention_scale=key * into**2 / attention.kv_channels**0.5),
        mlp,
        beside=beside,
        embedding_scale=float(fields.take("embedding_multiplier")),
        logit_scale=float(fields.take("lm_head_multiplier")),
    )


def _take_mamba2(fields: Fields) -> Mamba2:
    heads, size = fields.take("mamba_n_heads"), fields.take("mamba_d_head")
    fields.expect("mamba_d_ssm", (heads * size,), "the channels of all heads")
    norm = fields.take("mamba_rms_norm")
    if norm:
        fields.expect("mamba_norm_before_gate", (False,), "kernels normalise after the gate")
    else:
        fields.ignore("mamba_norm_before_gate", "there is no such norm")
    into, factors = fields.take("ssm_in_multiplier"), fields.take("ssm_multipliers")
    return Mamba2(
        num_heads=heads,
        head_dim=size,
        groups=fields.take("mamba_n_groups"),
        state_size=fields.take("mamba_d_state"),
        taps=fields.take("mamba_d_conv"),
        conv_bias=fields.take("mamba_conv_bias"),
        norm=norm,
        factors=tuple(float(into * each) for _, each in zip("zxBCd", factors, strict=True)),
        **recurrences.take_step_limits(fields),
    )
