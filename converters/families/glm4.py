"""GLM-4: norms around attention and MLP, part of each head rotated in pairs of neighbours, gate and
up projections in one tensor.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Norms
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared import dense, norm_rows
from megatron_policy.converters.families.shared.dense import H
from megatron_policy.converters.rows import GateUp, Joined

TABLE = (
    *dense.ENDS,
    *dense.NORMS,
    *norm_rows.after("post_self_attn_layernorm", "post_mlp_layernorm"),
    *dense.ATTENTION,
    *dense.QKV_BIAS,
    *(
        Joined((H + "mlp.gate_up_proj.weight",), row) if isinstance(row, GateUp) else row
        for row in dense.MLP
    ),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Glm4Config describes."""
    rope = take_rope(fields, partial=True, interleaved=True)
    bias = fields.take("attention_bias", True)
    attention = dense.take_attention(fields, rope=rope, qkv_bias=bias)
    return dense.architecture(fields, attention, norms=Norms.AROUND)
