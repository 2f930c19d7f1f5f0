"""Chooses the modules of a layer: Megatron-Core's with torch kernels, or Transformer Engine's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_policy.config.model_table import check_implementation
from megatron_policy.converters.architecture import (
    Architecture,
    Attention,
    LayerPart,
    Mla,
    Mlp,
    Moe,
    Norms,
    QkNorm,
    Recurrence,
)
from megatron_policy.converters.architecture.beyond import beyond_transformer_engine
from megatron_policy.device import is_accelerated
from megatron_policy.engines.megatron.layers.attention import LayerAttention, TorchAttention
from megatron_policy.engines.megatron.layers.decoder import DeepLayer, ParallelLayer, residual_sum
from megatron_policy.engines.megatron.layers.experts import experts_spec
from megatron_policy.engines.megatron.layers.mixers import (
    MIXERS,
    MixerLayer,
    SideBySideLayer,
    mixer_spec,
)
from megatron_policy.engines.megatron.layers.mla import mla_spec
from megatron_policy.engines.megatron.layers.norm import AllHeadsRMSNorm, EachHeadLayerNorm, norm_of
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
        beyond = beyond_transformer_engine(architecture, adapted)
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
    found, with_te = architecture.find_layer(layer), implementation == TRANSFORMER_ENGINE
    mixer, feed, one_norm = found.mixer, found.feed, found.norms is Norms.ONE
    if with_te:
        experts = feed.experts if isinstance(feed, Moe) else None
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=experts is not None,
            qk_layernorm=isinstance(mixer, Attention) and mixer.qk_norm is not QkNorm.NONE,
            multi_latent_attention=isinstance(mixer, Mla),
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=None, moe_grouped_gemm=False, qk_layernorm=False
        )
        norm = norm_of(architecture) if found.norms.before else IdentityOp
        spec.submodules.input_layernorm = norm
        spec.submodules.pre_mlp_layernorm = IdentityOp if one_norm else norm
        factor = feed.out_factor if isinstance(feed, Mlp) else 1.0
        for place, scale in (("self_attn_bda", 1.0), ("mlp_bda", factor)):
            if own_sum := residual_sum(architecture, found.norms, config, scale):
                setattr(spec.submodules, place, own_sum)
        if one_norm:
            spec.module = ParallelLayer
    for place, part in (("self_attention", mixer), ("mlp", feed)):
        if part is None:
            _leave_out(spec.submodules, place)
            continue
        given = getattr(spec.submodules, place)
        setattr(spec.submodules, place, _PARTS[type(part)](part, given, architecture, with_te))
    if isinstance(mixer, Recurrence):
        fused = {"input_layernorm.": f"{mixer.first}.layer_norm_"}  # its name in checkpoints
        spec.submodules.sharded_state_dict_keys_map |= fused
        if mixer.place != "self_attention":
            spec.module, spec.params = MixerLayer, {**spec.params, "place": mixer.place}
    if found.beside is not None:
        spec.module, spec.params = SideBySideLayer, {**spec.params, "beside": found.beside}
    if architecture.shell is not None and layer < architecture.shell.deep:
        assert spec.module is TransformerLayer, "deep features enter ordinary layers"
        spec.module = DeepLayer
    return spec


def final_norm(implementation: str, architecture: Architecture) -> ModuleSpec | type:
    """The norm after the last layer, to be built from `config`, `hidden_size` and `eps`."""
    if implementation == TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TENorm

        norm: type = TENorm
        return norm
    return norm_of(architecture)


def _make_attention_spec(
    part: Attention, given: ModuleSpec, architecture: Architecture, with_te: bool
) -> ModuleSpec:
    given.module = LayerAttention
    given.params = {**given.params, "part": part, "ropes": architecture.ropes}
    inner, norm, qk_norm = given.submodules, norm_of(architecture), part.qk_norm
    if with_te:
        inner.core_attention = te_attention(inner.core_attention)
        return given
    inner.core_attention = ModuleSpec(
        module=TorchAttention,
        params={
            "softcap": part.attention_softcap,
            "sinks": part.attention_sinks,
            "query_growth": part.query_growth,
            "post_rope_norm": norm if qk_norm is QkNorm.AFTER_ROTATION else None,
        },
    )
    for name, heads in (("q", part.num_attention_heads), ("k", part.num_query_groups)):
        kinds: dict[QkNorm, ModuleSpec] = {
            QkNorm.PER_HEAD: norm,
            QkNorm.EACH_HEAD: ModuleSpec(module=EachHeadLayerNorm, params={"heads": heads}),
            QkNorm.ALL_HEADS: ModuleSpec(module=AllHeadsRMSNorm, params={"heads": heads}),
        }
        setattr(inner, f"{name}_layernorm", kinds.get(qk_norm, IdentityOp))
    return given


def _leave_out(submodules: TransformerLayerSubmodules, place: str) -> None:
    """Let a layer pass by what it does not have: its norm, its module and its residual sum."""
    norms = {"self_attention": "input_layernorm", "mlp": "pre_mlp_layernorm"}
    sums = {"self_attention": "self_attn_bda", "mlp": "mlp_bda"}
    setattr(submodules, norms[place], IdentityOp)
    setattr(submodules, place, IdentityOp)
    setattr(submodules, sums[place], IdentityFuncOp)


_PARTS: dict[type[LayerPart], Callable[..., Any]] = {
    Attention: _make_attention_spec,
    **dict.fromkeys(MIXERS, lambda part, *_: mixer_spec(part)),
    Mla: lambda part, _, __, with_te: mla_spec(part, with_te),
    Mlp: lambda _, given, *__: given,
    Moe: lambda part, _, __, with_te: experts_spec(part, with_te),
}
"""What makes the spec of a part, from the one that Megatron-Core has in its place."""
