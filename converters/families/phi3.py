"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (dense, text): joined projections, partial rotation."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense
from megatron_policy.converters.families.shared.dense import H
from megatron_policy.converters.rows import GateUp, Joined, Qkv

_JOINED = {
    Qkv: H + "self_attn.qkv_proj.weight",
    GateUp: H + "mlp.gate_up_proj.weight",
}
TABLE = tuple(
    Joined((_JOINED[type(row)],), row) if isinstance(row, Qkv | GateUp) else row
    for row in (*dense.ENDS, *dense.BLOCK)
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Phi3Config describes."""
    for name in ("attention_bias", "mlp_bias"):
        fields.expect(name, (False,), "transformers has no biases in Phi-3")
    fields.ignore("auto_map", "the makers' own code, which transformers replaces")
    fields.ignore("embd_pdrop", "transformers has no dropout of embeddings in Phi-3")
    rope, window = take_rope(fields, partial=True), fields.take("sliding_window", None)
    return dense.architecture(
        fields,
        dense.take_attention(fields, rope=rope, window=window),
        hidden_dropout=fields.take("resid_pdrop", 0.0),
    )
