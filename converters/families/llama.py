"""Llama 2 and 3: no biases, or one on every linear layer; scaled rotary frequencies."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense

TABLE = (*dense.ENDS, *dense.BLOCK, *dense.LINEAR_BIAS)


def architecture(fields: Fields) -> Architecture:
    """The architecture a LlamaConfig describes."""
    fields.expect("rope_interleaved", (False,), "each head is rotated in halves")
    fields.ignore("is_llama_config", "a mark of the tool that converted the checkpoint")
    fields.ignore("pretraining_tp", "only the order of summation in pretraining")
    return dense.architecture(
        fields,
        dense.take_attention(fields, bias=fields.take("attention_bias", False)),
        dense.take_mlp(fields, mlp_bias=fields.take("mlp_bias", False)),
    )
