"""Builds this stage's Megatron-Core model chunks from an architecture; reads no weights and starts
no training.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.config import MegatronConfig
from megatron_policy.converters.architecture import Architecture, padded_vocab
from megatron_policy.converters.traits import QkNorm
from megatron_policy.device import current_device, is_accelerated
from megatron_policy.model.rope import inverse_frequencies
from megatron_policy.model.spec import TRANSFORMER_ENGINE, block_spec
from megatron_policy.topology import Placement, Topology


def build_chunks(
    architecture: Architecture,
    config: TransformerConfig,
    place: Placement,
    implementation: str,
    seed: int,
) -> list[GPTModel]:
    """The model chunks of this rank (one, or the topology's `vpp` of them), on the current device,
    weights uninitialised.
    """
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    return [
        _build_chunk(architecture, config, place, implementation, chunk)
        for chunk in range(place.topology.vpp)
    ]


def _build_chunk(
    architecture: Architecture,
    config: TransformerConfig,
    place: Placement,
    implementation: str,
    chunk: int,
) -> GPTModel:
    topology = place.topology
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(
            implementation, len(place.layers(chunk)), config.qk_layernorm
        ),
        vocab_size=padded_vocab(architecture.vocab_size, topology.tp),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=place.holds_embedding(chunk),
        post_process=place.holds_head(chunk),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope.base,
        vp_stage=chunk if topology.vpp > 1 else None,
    )
    # Megatron-Core knows one set of llama 3 scaling constants; the architecture has its own.
    frequencies = inverse_frequencies(architecture.rope, architecture.kv_channels)
    model.rotary_pos_emb.inv_freq = frequencies.to(current_device())
    return model


def transformer_config(
    architecture: Architecture,
    settings: MegatronConfig,
    topology: Topology,
    dtype: torch.dtype,
    implementation: str,
) -> TransformerConfig:
    """Megatron-Core's description of this model under this layout; `dtype` is that of parameters
    and activations.
    """
    return TransformerConfig(
        **_shape(architecture),
        **_parallelism(settings, topology, dtype),
        **_recomputation(settings),
        **_kernels(settings, implementation),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Losses come normalised by global counts: gradients are sums, never means.
        calculate_per_token_loss=True,
        # Every weight is read from the checkpoint: nothing is drawn at random first.
        # (perform_initialization=False would also drop the tensor-parallel marks that the gradient
        # norm relies on.)
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _shape(architecture: Architecture) -> dict[str, Any]:
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.kv_channels,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.layernorm_epsilon,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": architecture.add_bias_linear,
        "add_qkv_bias": architecture.add_qkv_bias,
        "qk_layernorm": architecture.qk_norm is not QkNorm.NONE,
        "attention_dropout": architecture.attention_dropout,
        "hidden_dropout": 0.0,
        # A window of W tokens reaches W - 1 positions back.
        "window_size": None if architecture.window is None else (architecture.window - 1, 0),
        "window_attn_skip_freq": [int(x) for x in architecture.windowed] or None,
    }


def _parallelism(
    settings: MegatronConfig, topology: Topology, dtype: torch.dtype
) -> dict[str, Any]:
    interleaved = topology.vpp > 1
    return {
        "tensor_model_parallel_size": topology.tp,
        "sequence_parallel": settings.sequence_parallel,
        "context_parallel_size": topology.cp,
        "expert_model_parallel_size": topology.ep,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": settings.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": settings.num_layers_in_last_pipeline_stage,
        "pipeline_dtype": dtype,
        # With two stages both neighbours are the same rank, and batched sends could not be told
        # apart.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Frees an output as soon as its send is queued. A stream keeps that in order; gloo may
        # still be reading.
        "deallocate_pipeline_outputs": topology.pp > 1 and is_accelerated(),
    }


def _recomputation(settings: MegatronConfig) -> dict[str, Any]:
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


def _kernels(settings: MegatronConfig, implementation: str) -> dict[str, Any]:
    with_te = implementation == TRANSFORMER_ENGINE
    apex_wgrad = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        "apply_rope_fusion": settings.apply_rope_fusion and with_te,
        "bias_activation_fusion": settings.bias_activation_fusion and is_accelerated(),
        "bias_dropout_fusion": is_accelerated(),
        "gradient_accumulation_fusion": is_accelerated() and apex_wgrad,
        "masked_softmax_fusion": False,
        "persist_layer_norm": with_te,
    }
