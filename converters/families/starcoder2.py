"""StarCoder2: layer norms with biases, and an MLP without a gate."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture, Norm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, norm_rows

TABLE = (
    *dense.ENDS,
    *dense.NORMS,
    *norm_rows.BIASES,
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    *dense.ungated_mlp("c_fc", "c_proj", biases=True),
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
            bias=bias,
            window=fields.take("sliding_window", None),
        ),
        dense.take_mlp(fields, gated=False, mlp_bias=bias),
        epsilon="norm_epsilon",
        norm=Norm.LAYER,
        norm_bias=True,
        hidden_dropout=fields.take("residual_dropout", 0.0),
        embedding_dropout=fields.take("embedding_dropout", 0.0),
    )
