"""Qwen3-Next: gated delta nets, gated attention on every fourth layer, experts, and a layer for
multi-token prediction that the config does not count.
"""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import (
    Architecture,
    Attention,
    DeltaNet,
    Norm,
    QkNorm,
)
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, experts, mtp, recurrences
from megatron_policy.converters.rows import Ignore, Qkv, Row

MTP_NAMES = mtp.Names(
    held="mtp.",
    left_out="mtp.",
    embedding_norm="pre_fc_norm_embedding.weight",
    hidden_norm="pre_fc_norm_hidden.weight",
    projection="fc.weight",
    final_norm="norm.weight",
    layer="mtp.layers.{mtp}.",
)
ATTENTION: tuple[Row | Ignore, ...] = (
    *dense.NORMS,
    *recurrences.rows_of_gated_attention(),
    *(row for row in (*dense.ATTENTION, *dense.ATTENTION_BIAS) if not isinstance(row, Qkv)),
    *dense.QK_NORM,
)
EXPERTS = (*experts.routed(), *experts.shared("shared_expert"))
TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *ATTENTION,
    *dense.MLP,
    *EXPERTS,
    *recurrences.rows_of_delta_net(by_key_heads=True),
    *mtp.layers((*ATTENTION, *EXPERTS), MTP_NAMES),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3NextConfig describes."""
    fields.expect("use_sliding_window", (False,), "no layer has a window")
    width = fields.take("shared_expert_intermediate_size")
    moe = experts.take_softmax_moe(fields, shared_ffn_hidden_size=width)
    feeds = experts.place(fields, moe, experts.take_sparse_layers(fields))
    return dense.architecture(
        fields, take_mixers(fields), feeds, norm=Norm.RMS_PLUS_ONE, further_layers=1
    )


def take_mixers(fields: Fields, **rope: Any) -> list[Attention | DeltaNet]:
    """The mixer of each layer. `rope` are further arguments of `take_rope`."""
    fields.ignore("full_attention_interval", "layer_types states it for each layer")
    fields.expect("hidden_act", ("silu", "swish"), "convolutions and gates of delta nets have it")
    attention = dense.take_attention(
        fields,
        rope=take_rope(fields, partial=True, fraction=0.25, **rope),
        bias=fields.take("attention_bias", False),
        qk_norm=QkNorm.PER_HEAD,
        attention_output_gate=True,
    )
    delta = DeltaNet(
        num_key_heads=fields.take("linear_num_key_heads"),
        num_value_heads=fields.take("linear_num_value_heads"),
        key_head_dim=fields.take("linear_key_head_dim"),
        value_head_dim=fields.take("linear_value_head_dim"),
        taps=fields.take("linear_conv_kernel_dim"),
    )
    kinds: dict[str, Attention | DeltaNet] = {
        "full_attention": attention,
        "linear_attention": delta,
    }
    return recurrences.take_layers(fields, "layer_types", kinds)
