"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts and a gated shared MLP for every token."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Attention, Mixer
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts
from megatron_policy.converters.rows import Ignore, Row

TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *dense.BLOCK,
    *dense.QKV_BIAS,
    *experts.routed(),
    *experts.shared("shared_expert"),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen2MoeConfig describes."""
    attention = dense.take_attention(fields, qkv_bias=fields.take("qkv_bias", True))
    layers: Mixer | list[Attention] = attention
    if fields.take("layer_types", None) is not None:
        layers = dense.take_windows(fields, attention)
    else:
        why = "this release of transformers does not say which layers have the window"
        fields.expect("use_sliding_window", (False,), why)
        for name in ("sliding_window", "max_window_layers"):
            fields.ignore(name, "use_sliding_window is false")
    moe = experts.take_softmax_moe(
        fields, shared_ffn_hidden_size=fields.take("shared_expert_intermediate_size")
    )
    feeds = experts.place(fields, moe, experts.take_sparse_layers(fields))
    return dense.architecture(fields, layers, feeds)
