"""Builds this stage's Megatron-Core model chunks from an architecture, without weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

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
from megatron_policy.engines.megatron.mtp import add_mtp_layers
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
    _install_scales(model, architecture)
    install_activations(model, architecture, config)
    add_mtp_layers(model, architecture, config, implementation, place, chunk)
    _move(model, current_device())
    return model


def _install_scales(model: GPTModel, architecture: Architecture) -> None:
    """Make a chunk that holds the embeddings scale them as the architecture says."""
    if model.pre_process:
        model.embedding.embedding_dropout.p = architecture.embedding_dropout
        if architecture.embedding_scale != 1.0:
            model.embedding.register_forward_hook(_Scaled(architecture.embedding_scale))


class _Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        # In the activations' precision, to which transformers also rounds the factor.
        return output * output.new_full((), self.scale)


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Move what Megatron-Core makes in host memory: routers, and gates of shared experts."""
    for parameter in model.parameters():
        if parameter.device != device:
            parameter.data = parameter.data.to(device)


def held_layers(
    chunks: Sequence[GPTModel], place: Placement
) -> Iterator[tuple[int, torch.nn.Module]]:
    """The decoder layers of `chunks` by global number."""
    for index, chunk in enumerate(chunks):
        yield from zip(place.layers(index), chunk.decoder.layers, strict=True)
