"""Apertus: an MLP without a gate whose activation function has learnt constants, and QK norm."""

from __future__ import annotations

from megatron_policy.converters.architecture import Activation, Architecture, QkNorm
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense
from megatron_policy.converters.families.shared.dense import H, M
from megatron_policy.converters.rows import Ignore, Reshaped, Role, Row, Whole

_FUNCTION, _HF_FUNCTION = M + "mlp.activation_func.", H + "mlp.act_fn."
TABLE: tuple[Row | Ignore, ...] = (
    *dense.ENDS,
    *(
        Whole(f"{M}{name}.weight", (f"{H}{hf}.weight",), ("hidden_size",), role=Role.NORM)
        for name, hf in (
            ("input_layernorm", "attention_layernorm"),
            ("pre_mlp_layernorm", "feedforward_layernorm"),
        )
    ),
    *dense.ATTENTION,
    *dense.ATTENTION_BIAS,
    *dense.QK_NORM,
    *dense.ungated_mlp("up_proj", "down_proj"),
    *(
        Whole(_FUNCTION + name, (_HF_FUNCTION + name,), (1,), role=Role.ACTIVATION)
        for name in ("alpha_p", "alpha_n")
    ),
    *(
        Reshaped(
            _FUNCTION + name,
            (_HF_FUNCTION + name,),
            (1,),
            hf_dims=(),
            role=Role.ACTIVATION,
            learnt=False,
        )
        for name in ("beta", "eps")
    ),
)


def architecture(fields: Fields) -> Architecture:
    """The architecture an ApertusConfig describes."""
    fields.expect("hidden_act", ("xielu",), "the table has rows for the constants of xIELU")
    fields.expect("qk_norm", (True,), "transformers always normalises queries and keys")
    fields.expect("post_norm", (False,), "the inputs of attention and MLP are normalised")
    fields.expect("mlp_bias", (False,), "transformers has no biases in Apertus's MLPs")
    bias = fields.take("attention_bias", False)
    return dense.architecture(
        fields,
        dense.take_attention(fields, bias=bias, qk_norm=QkNorm.PER_HEAD),
        dense.take_mlp(fields, activation=Activation.XIELU, gated=False),
    )
