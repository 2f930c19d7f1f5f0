"""GLM-4.7 Flash: DeepSeek-V3's latent attention and experts, with dense layers named one by one."""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.layer import check_number
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts, mla, mtp

from . import deepseek_v3

TABLE = deepseek_v3.TABLE


def architecture(fields: Fields) -> Architecture:
    """The architecture a Glm4MoeLiteConfig describes."""
    fields.ignore("pretraining_tp", "only the order of summation in pretraining")
    for name in ("first_k_dense_replace", "moe_layer_freq"):
        fields.ignore(name, "mlp_layer_types states it for each layer")
    return dense.architecture(
        fields,
        mla.take_mla(fields),
        experts.place(fields, experts.take_sigmoid_moe(fields), _take_layers(fields)),
        further_layers=mtp.take_layers(fields),
    )


def _take_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers have experts: all but the first, unless the config says otherwise."""
    number: int = fields.take("num_hidden_layers")
    check_number(number)
    kinds = fields.take("mlp_layer_types", None) or ["dense"] + ["sparse"] * (number - 1)
    if len(kinds) != number:
        fields.refuse("mlp_layer_types", kinds, "must name every layer")
        return (True,) * number
    for kind in dict.fromkeys(kinds):
        if kind not in ("dense", "sparse"):
            fields.refuse("mlp_layer_types", kind, "must be dense or sparse")
    return tuple(kind == "sparse" for kind in kinds)
