"""StarCoder2: layer norms with biases, and an MLP without a gate."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Mlp, Norm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, norm_rows
from megatron_policy.converters.families.shared.dense import H, M
from megatron_policy.converters.rows import Columns, Role, Rows, Whole, rows_of

_FC1, _FC2 = M + "mlp.linear_fc1.", M + "mlp.linear_fc2."
TABLE = (
    *dense.ENDS,
    *dense.NORMS,
    *norm_rows.BIASES,
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    *rows_of(
        Mlp,
        Columns(_FC1 + "weight", (H + "mlp.c_fc.weight",), ("ffn_hidden_size", "hidden_size")),
        Columns(
            _FC1 + "bias",
            (H + "mlp.c_fc.bias",),
            ("ffn_hidden_size",),
            when="mlp_bias",
            role=Role.BIAS,
        ),
        Rows(_FC2 + "weight", (H + "mlp.c_proj.weight",), ("hidden_size", "ffn_hidden_size")),
        Whole(
            _FC2 + "bias",
            (H + "mlp.c_proj.bias",),
            ("hidden_size",),
            when="mlp_bias",
            role=Role.BIAS,
        ),
    ),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture a Starcoder2Config describes."""
    for name in ("norm_type", "mlp_type"):
        fields.ignore(name, "transformers supports one kind of it in StarCoder2")
    bias = fields.take("use_bias", True)
    return dense.architecture(
        fields,
        dense.take_attention(
            fields,
            qkv_bias=bias,
            proj_bias=bias,
            window=fields.take("sliding_window", None),
        ),
        dense.take_mlp(fields, gated=False, mlp_bias=bias),
        epsilon="norm_epsilon",
        norm=Norm.LAYER,
        norm_bias=True,
        hidden_dropout=fields.take("residual_dropout", 0.0),
        embedding_dropout=fields.take("embedding_dropout", 0.0),
    )
