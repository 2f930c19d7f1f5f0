"""Builds this stage's Megatron-Core model chunks from an architecture; reads no weights and starts
no training.
"""

from __future__ import annotations

import logging

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.converters.architecture import Architecture, padded_vocab
from megatron_policy.model.rope import Rotary, ropes_of
from megatron_policy.model.scales import install_scales
from megatron_policy.model.spec import block_spec
from megatron_policy.topology import Placement


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
            implementation, architecture, place.layers(chunk), config
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
    if architecture.mla is None:
        model.rotary_pos_emb = Rotary(ropes_of(architecture), architecture.kv_channels)
    install_scales(model, architecture)
    return model
