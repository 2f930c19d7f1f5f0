"""Chooses the modules of a layer: Megatron-Core's with torch kernels, or Transformer Engine's."""

from __future__ import annotations

import importlib.util

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.config.adapters import beyond_its_modules, check_implementation
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import QkNorm
from megatron_policy.device import is_accelerated
from megatron_policy.engines.megatron.layers.attention import TorchAttention
from megatron_policy.engines.megatron.layers.experts import experts_spec
from megatron_policy.engines.megatron.layers.mla import mla_spec
from megatron_policy.engines.megatron.layers.norm import norm_of
from megatron_policy.engines.megatron.layers.parallel_layer import ParallelLayer
from megatron_policy.engines.megatron.layers.qk_norm import AllHeadsRMSNorm, EachHeadLayerNorm
from megatron_policy.engines.megatron.layers.residual import residual_sum
from megatron_policy.engines.megatron.layers.self_attention import LayerAttention
from megatron_policy.engines.megatron.layers.te_attention import te_attention
from megatron_policy.engines.megatron.model_config import LOCAL, TRANSFORMER_ENGINE
from megatron_policy.errors import ConfigError


def resolve_implementation(
    requested: str, architecture: Architecture, adapted: bool = False
) -> str:
    """`auto` takes Transformer Engine if it and a GPU are available and it can express the model,
    which has adapters if it is `adapted`; an explicit request that cannot be met is refused.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = installed and is_accelerated()
    if requested == "auto":
        beyond = beyond_its_modules(architecture, adapted)
        return TRANSFORMER_ENGINE if usable and not beyond else LOCAL
    check_implementation(requested, architecture, adapted)
    if requested == TRANSFORMER_ENGINE and not usable:
        missing = "no GPU is visible" if installed else "it is not installed"
        raise ConfigError(
            f"policy.megatron_cfg.transformer_impl is 'transformer_engine', but {missing}; "
            "use 'auto' or 'local', or install megatron-policy[te] on a machine with a GPU"
        )
    return requested


def block_spec(
    implementation: str, architecture: Architecture, layers: range, config: TransformerConfig
) -> TransformerBlockSubmodules:
    """The submodules of a block of these (global) decoder layers with its final norm."""
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(implementation, architecture, config, layer) for layer in layers],
        layer_norm=final_norm(implementation, architecture),
    )


def layer_spec(
    implementation: str, architecture: Architecture, config: TransformerConfig, layer: int
) -> ModuleSpec:
    """The spec of a decoder layer by its global number."""
    if implementation == TRANSFORMER_ENGINE:
        return _te_layer(architecture, layer)
    return _local_layer(architecture, config, layer)


def final_norm(implementation: str, architecture: Architecture) -> ModuleSpec | type:
    """The norm after the last layer, to be built from `config`, `hidden_size` and `eps`."""
    if implementation == TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TENorm

        norm: type = TENorm
        return norm
    return norm_of(architecture)


def _te_layer(architecture: Architecture, layer: int) -> ModuleSpec:
    moe = architecture.moe if architecture.has_experts(layer) else None
    experts = None if moe is None else moe.experts
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts,
        moe_grouped_gemm=experts is not None,
        qk_layernorm=architecture.qk_norm is not QkNorm.NONE,
        multi_latent_attention=architecture.mla is not None,
    )
    parts = spec.submodules
    if experts is not None:
        parts.mlp = experts_spec(architecture, with_te=True)
    if architecture.mla is not None:
        parts.self_attention = mla_spec(architecture, with_te=True)
    else:
        _adapt_attention(parts.self_attention, architecture)
        inner = parts.self_attention.submodules
        inner.core_attention = te_attention(inner.core_attention)
    return spec


def _local_layer(architecture: Architecture, config: TransformerConfig, layer: int) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(num_experts=None, moe_grouped_gemm=False, qk_layernorm=False)
    parts = spec.submodules
    norm = norm_of(architecture)
    parts.input_layernorm = norm if architecture.pre_norm else IdentityOp
    parts.pre_mlp_layernorm = norm if architecture.pre_norm else IdentityOp
    if own_sum := residual_sum(architecture, config):
        parts.self_attn_bda = parts.mlp_bda = own_sum
    if architecture.has_experts(layer):
        parts.mlp = experts_spec(architecture, with_te=False)
    if architecture.mla is not None:
        parts.self_attention = mla_spec(architecture, with_te=False)
    else:
        _complete_attention(parts.self_attention, architecture)
    if architecture.parallel:
        parts.pre_mlp_layernorm = IdentityOp
        spec.module = ParallelLayer
    return spec


def _complete_attention(attention: ModuleSpec, architecture: Architecture) -> None:
    _adapt_attention(attention, architecture)
    parts = attention.submodules
    parts.core_attention = ModuleSpec(
        module=TorchAttention,
        params={
            "softcap": architecture.attention_softcap,
            "sinks": architecture.attention_sinks,
            "query_growth": architecture.query_growth,
            "post_rope_norm": norm_of(architecture)
            if architecture.qk_norm is QkNorm.AFTER_ROTATION
            else None,
        },
    )
    parts.q_layernorm = _qk_norm(architecture, architecture.num_attention_heads)
    parts.k_layernorm = _qk_norm(architecture, architecture.num_query_groups)


def _adapt_attention(attention: ModuleSpec, architecture: Architecture) -> None:
    attention.module = LayerAttention
    attention.params = {**attention.params, "architecture": architecture}


def _qk_norm(architecture: Architecture, heads: int) -> ModuleSpec | type:
    match architecture.qk_norm:
        case QkNorm.NONE | QkNorm.AFTER_ROTATION:
            return IdentityOp
        case QkNorm.PER_HEAD:
            return norm_of(architecture)
        case QkNorm.EACH_HEAD:
            return ModuleSpec(module=EachHeadLayerNorm, params={"heads": heads})
        case QkNorm.ALL_HEADS:
            return ModuleSpec(module=AllHeadsRMSNorm, params={"heads": heads})
