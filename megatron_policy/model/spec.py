"""Which modules a layer is made of: Megatron-Core's with our torch kernels, or Transformer
Engine's.
"""

from __future__ import annotations

import importlib.util

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_policy.device import is_accelerated
from megatron_policy.errors import ConfigError
from megatron_policy.model.attention import TorchAttention
from megatron_policy.model.norm import RMSNorm

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"


def resolve_implementation(requested: str) -> str:
    """`auto` takes Transformer Engine when it and a GPU are there; an explicit wish that cannot be
    met is refused.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = installed and is_accelerated()
    if requested == "auto":
        return TRANSFORMER_ENGINE if usable else LOCAL
    if requested == TRANSFORMER_ENGINE and not usable:
        missing = "no GPU is visible" if installed else "it is not installed"
        raise ConfigError(
            f"policy.megatron_cfg.transformer_impl is 'transformer_engine', but {missing}; "
            "use 'auto' or 'local', or install megatron-policy[te] on a machine with a GPU"
        )
    return requested


def block_spec(
    implementation: str, num_layers: int, qk_layernorm: bool
) -> TransformerBlockSubmodules:
    """The submodules of a block of `num_layers` dense decoder layers with its final norm."""
    if implementation == TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=None, moe_grouped_gemm=False, qk_layernorm=qk_layernorm
        )
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    return TransformerBlockSubmodules(
        layer_specs=[_local_layer(qk_layernorm)] * num_layers, layer_norm=RMSNorm
    )


def _local_layer(qk_layernorm: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=None,
        moe_grouped_gemm=False,
        qk_layernorm=qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TorchAttention
    if qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return layer
