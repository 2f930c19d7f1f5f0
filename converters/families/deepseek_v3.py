"""DeepSeek-V3 and R1: multi-latent attention (MLA), and experts chosen from groups by corrected
scores.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts, mla, mtp
from megatron_policy.converters.rows import Ignore, Row

_LAYER: tuple[Row | Ignore, ...] = (
    *dense.NORMS,
    *mla.ATTENTION,
    *dense.MLP,
    *experts.routed(),
    experts.CORRECTION_BIAS,
    *experts.shared("shared_experts"),
)
TABLE: tuple[Row | Ignore, ...] = (*dense.ENDS, *_LAYER, *mtp.layers(_LAYER))


def architecture(fields: Fields) -> Architecture:
    """The architecture a DeepseekV3Config describes."""
    fields.ignore("pretraining_tp", "only the order of summation in pretraining")
    fields.ignore("ep_size", "how the makers' own code spread the experts")
    fields.ignore("auto_map", "the makers' own code, which transformers replaces")
    fields.ignore("seq_aux", "moe_router_load_balancing_type chooses the loss")
    moe = experts.take_sigmoid_moe(fields)
    layers = experts.take_layers_after_dense(fields)
    return dense.architecture(
        fields,
        mla.take_mla(fields),
        experts.place(fields, moe, layers, balancing="aux_loss_alpha"),
        further_layers=mtp.take_layers(fields),
    )
