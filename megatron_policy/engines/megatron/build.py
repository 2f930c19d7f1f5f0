"""Builds this stage's Megatron-Core model chunks from an architecture, without weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.converters.architecture import Architecture, Attention, padded_vocab
from megatron_policy.device import current_device
from megatron_policy.engines.megatron.head import ScalarLayer
from megatron_policy.engines.megatron.layer_spec import block_spec
from megatron_policy.engines.megatron.layers.activations import install_activations
from megatron_policy.engines.megatron.layers.rope import Rotary
from megatron_policy.engines.megatron.layers.router import tell_routers
from megatron_policy.engines.megatron.mtp import add_mtp_layers, find_embeddings
from megatron_policy.engines.megatron.process_groups import are_shared
from megatron_policy.parallel.topology import Placement


def build_chunks(
    architecture: Architecture,
    config: TransformerConfig,
    place: Placement,
    implementation: str,
    seed: int,
) -> list[GPTModel]:
    """The model chunks of this rank (one, or the topology's `vpp`), on the current device, with
    uninitialised weights.
    """
    if not are_shared():  # the random streams are those of all policies of the process
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    with _without_random_streams():
        chunks = [
            _build_chunk(architecture, config, place, implementation, chunk)
            for chunk in range(place.topology.vpp)
        ]
    if architecture.moe is not None:
        for number, layer in held_layers(chunks, place):
            tell_routers(layer, number)
    return chunks


@contextmanager
def _without_random_streams() -> Iterator[None]:
    """Keep Megatron-Core from switching to a random stream and back for every weight, none of which
    is drawn: on a GPU, each time waits for the device.
    """
    tracker = vars(get_cuda_rng_tracker())
    tracker["fork"] = lambda *_: nullcontext()
    try:
        yield
    finally:
        del tracker["fork"]


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
        vp_stage=chunk if topology.vpp > 1 else None,
    )
    if (attention := architecture.find_part(Attention)) is not None:
        model.rotary_pos_emb = Rotary(architecture.ropes, attention.kv_channels)
    if architecture.head is not None and place.holds_head(chunk):
        model.output_layer = ScalarLayer(config, architecture.head.per_token)
    if model.pre_process:
        model.embedding.embedding_dropout.p = architecture.embedding_dropout
    install_activations(model, architecture, config)
    add_mtp_layers(model, architecture, config, implementation, place, chunk)
    for parameter in model.parameters():
        # Megatron-Core makes routers, and gates of shared experts, in host memory.
        if parameter.device != current_device():
            parameter.data = parameter.data.to(current_device())
    return model


def make_embedding(
    chunks: Sequence[GPTModel], architecture: Architecture
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a rank that has these chunks makes of tokens `[R, T]` with its embedding, which can be
    the copy for multi-token prediction: hidden states `[S, R, D]`, its share of the positions under
    sequence parallelism.
    """
    modules = [module for chunk in chunks for module in find_embeddings(chunk)]
    scale = architecture.embedding_scale

    def embed(tokens_RT: torch.Tensor) -> torch.Tensor:
        (module,) = modules
        hidden_SRD: torch.Tensor = module(tokens_RT, None)
        if scale != 1.0:
            # In the activations' precision, to which transformers also rounds the factor.
            hidden_SRD = hidden_SRD * hidden_SRD.new_full((), scale)
        return hidden_SRD

    return embed


def held_layers(
    chunks: Sequence[GPTModel], place: Placement
) -> Iterator[tuple[int, torch.nn.Module]]:
    """The decoder layers of `chunks` by global number."""
    for index, chunk in enumerate(chunks):
        yield from zip(place.layers(index), chunk.decoder.layers, strict=True)
