"""Megatron-Core's config of a model under a layout, from an architecture and settings."""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from megatron_policy.config import MegatronConfig
from megatron_policy.converters.architecture import (
    Activation,
    Architecture,
    Attention,
    Mla,
    Mlp,
    Norm,
    QkNorm,
)
from megatron_policy.device import can_compile, is_accelerated
from megatron_policy.engines.megatron.layers.activations import FUNCTIONS, scale_input
from megatron_policy.engines.megatron.layers.experts import expert_fields
from megatron_policy.engines.megatron.layers.mla import mla_fields
from megatron_policy.parallel.topology import LayerSplit, Topology

_log = logging.getLogger(__name__)

_GRAPHS = next(
    name
    for name in ("cuda_graph_modules", "cuda_graph_scope")
    if name in TransformerConfig.__dataclass_fields__
)
"""What releases name the parts of a layer that are captured in CUDA graphs."""

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"


def transformer_config(
    architecture: Architecture,
    settings: MegatronConfig,
    topology: Topology,
    dtype: torch.dtype,
    implementation: str,
    variable_lengths: bool = False,
    split: LayerSplit | None = None,
) -> TransformerConfig:
    """Megatron-Core's config of this model under this layout; `dtype` is that of parameters and
    activations.

    With `variable_lengths` microbatches differ in shape: Megatron-Core asks its communicator for
    the shape of everything that a stage receives (`hidden_shapes.py`). Stages have the layers of
    `split`, by default equally many.
    """
    with_te = implementation == TRANSFORMER_ENGINE
    mla = architecture.find_part(Mla)
    kind = TransformerConfig if mla is None else MLATransformerConfig
    return kind(
        **_describe_model(architecture),
        **expert_fields(architecture, settings, topology, with_te, variable_lengths),
        **mla_fields(mla),
        **_describe_parallelism(settings, topology, dtype),
        pipeline_model_parallel_layout=_list_layers(split) if split and topology.pp > 1 else None,
        **_describe_recomputation(settings),
        **_describe_kernels(architecture, settings, implementation),
        variable_seq_lengths=variable_lengths and topology.pp > 1,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        # Losses are normalized by global counts: gradients are sums, never means.
        calculate_per_token_loss=True,
        # Every weight is read from the checkpoint, so none is initialised at random.
        # (perform_initialization=False would also drop the tensor-parallel attributes that the
        # gradient norm relies on.)
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _describe_model(architecture: Architecture) -> dict[str, Any]:
    """Sizes, norms, and what layers have in common; `LayerAttention` has that in which the
    attention of layers differs.
    """
    mixer, attention = architecture.mixer, architecture.find_part(Attention)
    qk_norm = QkNorm.NONE if attention is None else attention.qk_norm
    feed = architecture.feed
    clamped = feed.activation is Activation.CLAMPED_SWIGLU
    gate_factor = feed.gate_factor if isinstance(feed, Mlp) else 1.0
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": mixer.num_attention_heads,
        "num_query_groups": mixer.num_query_groups,
        "kv_channels": mixer.kv_channels,
        "ffn_hidden_size": architecture.unused_ffn_hidden_size or feed.ffn_hidden_size,
        "hidden_dropout": architecture.hidden_dropout,
        "normalization": "LayerNorm" if architecture.norm is Norm.LAYER else "RMSNorm",
        "layernorm_zero_centered_gamma": architecture.norm is Norm.RMS_PLUS_ONE,
        "layernorm_epsilon": architecture.layernorm_epsilon,
        "add_qkv_bias": attention is not None and attention.qkv_bias,
        # This flag makes Megatron-Core sum the gradients of such norms over tensor-parallel ranks,
        # which is right for weights that all heads share.
        "qk_layernorm": qk_norm in (QkNorm.PER_HEAD, QkNorm.AFTER_ROTATION),
        "attention_dropout": mixer.attention_dropout,
        "softmax_scale": mixer.attention_scale,
        "rotary_interleaved": any(rope.interleaved for rope in architecture.ropes),
        # Of the dense layers; experts partly share them.
        "activation_func_clamp_value": 7.0 if clamped else None,
        "glu_linear_offset": 1.0 if clamped else 0.0,
        "gated_linear_unit": feed.gated,
        "activation_func": scale_input(FUNCTIONS[feed.activation], gate_factor),
        # Attention overrides it, see `LayerAttention`.
        "add_bias_linear": feed.mlp_bias,
    }


def _describe_parallelism(
    settings: MegatronConfig, topology: Topology, dtype: torch.dtype
) -> dict[str, Any]:
    interleaved = topology.vpp > 1
    return {
        "tensor_model_parallel_size": topology.tp,
        "sequence_parallel": settings.sequence_parallel,
        "context_parallel_size": topology.cp,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.expert_tp,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp if interleaved else None,
        "pipeline_dtype": dtype,
        # With two stages both neighbours are the same rank, and batched sends could not be told
        # apart.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # It waits for the device at every exchange, for the sake of older torch releases.
        "batch_p2p_sync": False,
        # Frees an output as soon as its send is queued. A stream keeps that in order; gloo could
        # still be reading it.
        "deallocate_pipeline_outputs": topology.pp > 1 and is_accelerated(),
    }


def _list_layers(split: LayerSplit) -> list[list[str]]:
    """What each model chunk has, as Megatron-Core takes it, in the order of the layers."""
    chunks = [["decoder"] * len(layers) for layers in split.chunks]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _describe_recomputation(settings: MegatronConfig) -> dict[str, Any]:
    granularity = settings.recompute_granularity
    if granularity is None and settings.activation_checkpointing:
        granularity = "full"
    if granularity is None:
        return {}
    if granularity == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(settings.recompute_modules or ("core_attn",)),
        }
    return {
        "recompute_granularity": "full",
        "recompute_method": settings.recompute_method or "uniform",
        "recompute_num_layers": settings.recompute_num_layers or 1,
    }


def _describe_kernels(
    architecture: Architecture, settings: MegatronConfig, implementation: str
) -> dict[str, Any]:
    with_te = implementation == TRANSFORMER_ENGINE
    # Megatron-Core's fused GELU is always the tanh approximation, whatever function is requested.
    feed = architecture.feed
    swiglu = feed.gated and feed.activation is Activation.SILU
    swiglu = swiglu and not (isinstance(feed, Mlp) and feed.gate_factor != 1.0)
    fused_rope = settings.apply_rope_fusion and with_te and architecture.find_part(Mla) is None
    compiled = is_accelerated() and can_compile()
    if is_accelerated() and not compiled:
        _log.warning(
            "bias, dropout and activation are not fused: torch.compile needs Triton, a C "
            "compiler (gcc or clang on the path, or CC) and Python's headers"
        )
    return {
        "apply_rope_fusion": fused_rope,
        "bias_activation_fusion": settings.bias_activation_fusion and compiled and swiglu,
        "bias_dropout_fusion": compiled,
        # For all linear layers it needs APEX, and drops gradients of weights that are also read
        # otherwise, as the head's and grouped experts' are. `fuse_weight_gradients` sets it.
        "gradient_accumulation_fusion": False,
        # Otherwise the first microbatch of a run of the schedule overwrites such gradients.
        "disable_parameter_transpose_cache": with_te,
        "masked_softmax_fusion": False,
        # No CUDA graphs: their default is a name that Megatron-Core itself warns of.
        _GRAPHS: [],
        "persist_layer_norm": with_te,
    }
