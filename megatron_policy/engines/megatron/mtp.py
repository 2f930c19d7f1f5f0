"""Multi-token prediction (MTP): layers after the last one, each of which predicts one token further
from the embedding of a token that is already known.

Layer k = 1, 2, ... takes hidden states that stand for the tokens up to t + k - 1 (layer 1: those of
the model itself, after its final norm or before it) and the embedding of token t + k, and gives
hidden states from which the head predicts token t + k + 1. Rotary positions stay those of token t.
Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2. As Megatron-Core's,
the projection here has the embedding as the first half of its input, then the hidden states.

Shapes: R rows, T positions of them that this context-parallel rank computes, S of these on this
rank (its share under sequence parallelism), D model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.config import MegatronConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.engines.megatron.head import Head
from megatron_policy.engines.megatron.layer_spec import final_norm, layer_spec
from megatron_policy.engines.megatron.layers.norm import WholeLinear
from megatron_policy.engines.megatron.layers.sequences import SequenceParams, sequence_params
from megatron_policy.engines.megatron.process_groups import embedding_group
from megatron_policy.interfaces.embedder import Embedder
from megatron_policy.lm_head.output import shifted
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.parallel.topology import Placement


class MtpLayer(torch.nn.Module):
    """One layer: two norms, the projection, a decoder layer and a final norm."""

    def __init__(
        self,
        model: GPTModel,
        architecture: Architecture,
        config: TransformerConfig,
        implementation: str,
        number: int,
    ) -> None:
        """`number` counts from 0."""
        super().__init__()
        layer = architecture.num_layers + number
        # Megatron-Core adds the number of layers before this chunk.
        before = model.decoder.layers[0].layer_number - 1

        def norm() -> Any:
            return build_module(
                final_norm(implementation, architecture),
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )

        self.config = config
        self.enorm, self.hnorm = norm(), norm()
        width = config.hidden_size
        self.eh_proj = WholeLinear(config, architecture.mtp_projection_size, width)
        self.transformer_layer = build_module(
            layer_spec(implementation, architecture, config, layer),
            config=config,
            layer_number=layer + 1 - before,
            pg_collection=model.pg_collection,
            vp_stage=model.vp_stage,
        )
        self.final_layernorm = norm()

    def forward(
        self,
        hidden_SRD: torch.Tensor,
        embedded_SRD: torch.Tensor,
        angles: torch.Tensor | None,
        params: SequenceParams | None,
    ) -> torch.Tensor:
        """Hidden states `[S, R, D]` one token further on; `angles` are what `Rotary` returns."""

        def compute(hidden_SRD: torch.Tensor, embedded_SRD: torch.Tensor) -> torch.Tensor:
            both = torch.cat((self.enorm(embedded_SRD), self.hnorm(hidden_SRD)), dim=-1)
            result: torch.Tensor
            result, _ = self.transformer_layer(
                hidden_states=self.eh_proj(both)[0],
                attention_mask=None,
                rotary_pos_emb=angles,
                packed_seq_params=params,
            )
            return result

        if self.config.recompute_granularity == "full" and torch.is_grad_enabled():
            if not (hidden_SRD.requires_grad or embedded_SRD.requires_grad):
                # Otherwise the recomputed part would have no gradient.
                hidden_SRD = hidden_SRD.detach().requires_grad_()
            output = tensor_parallel.checkpoint(compute, False, hidden_SRD, embedded_SRD)
        else:
            output = compute(hidden_SRD, embedded_SRD)
        normed: torch.Tensor = self.final_layernorm(output)
        return normed


class MtpBlock(torch.nn.Module):
    """The MTP layers of a model's last chunk, and an embedding where that chunk has none of its
    own.
    """

    embedding: LanguageModelEmbedding | None

    def __init__(
        self,
        model: GPTModel,
        architecture: Architecture,
        config: TransformerConfig,
        implementation: str,
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            MtpLayer(model, architecture, config, implementation, number)
            for number in range(architecture.mtp_layers)
        )
        self.before_norm = architecture.mtp_before_norm
        self.embedding = None
        if not model.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=model.vocab_size,
                max_sequence_length=model.max_sequence_length,
                position_embedding_type="rope",
                tp_group=model.pg_collection.tp,
            )
            if architecture.tied:
                self.embedding.word_embeddings.weight = model.output_layer.weight


def add_mtp_layers(
    model: GPTModel,
    architecture: Architecture,
    config: TransformerConfig,
    implementation: str,
    place: Placement,
    chunk: int,
) -> None:
    """Give a chunk its part of the MTP layers, if the model has any: the last chunk holds them, and
    where it lacks the embedding, a copy of it that is trained along with the first chunk's.
    """
    if not architecture.mtp_layers:
        return
    chunk_: Any = model
    if place.holds_head(chunk):
        # Megatron-Core looks for an attribute `mtp` and expects its own modules there.
        chunk_.mtp_block = MtpBlock(model, architecture, config, implementation)
    if architecture.tied or place.topology.pp == 1:
        return  # one parameter, or copies that Megatron-Core keeps alike for the head
    for module in find_embeddings(chunk_):
        weight = module.word_embeddings.weight
        weight.has_copy = True
        # Its own bucket of gradients: then both stages spread it alike over data-parallel ranks.
        weight.shared_embedding = True


def find_embeddings(model: Any) -> list[Any]:
    """The embeddings of a chunk: its own, and that of its MTP layers."""
    block = getattr(model, "mtp_block", None)
    found = (getattr(model, "embedding", None), getattr(block, "embedding", None))
    return [embedding for embedding in found if embedding is not None]


def sum_embedding_gradients(chunks: Iterable[Any]) -> None:
    """Where the first stage and the last have a copy each of an untied embedding, add up the
    gradients of both. They are reduced over data-parallel ranks already. Collective over these two.
    """
    for chunk in chunks:
        for embedding in find_embeddings(getattr(chunk, "module", chunk)):
            weight = embedding.word_embeddings.weight
            if getattr(weight, "has_copy", False) and weight.requires_grad:
                dist.all_reduce(weight.main_grad, group=embedding_group())


@contextmanager
def before_final_norm(model: Any) -> Iterator[list[torch.Tensor]]:
    """In this context the list gets what a chunk's final norm takes, `[S, R, D]`, if its MTP layers
    want that.
    """
    taken: list[torch.Tensor] = []
    block = getattr(model, "mtp_block", None)
    if block is None or not block.before_norm:
        yield taken
        return
    norm = model.decoder.final_layernorm
    handle = norm.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    try:
        yield taken
    finally:
        handle.remove()


@dataclass(frozen=True)
class MegatronMtp:
    """The MTP layers of the chunk that ends the pipeline, as `lm_head.head.MtpLayers`.

    Further token number k is predicted by layer k or, if one layer is repeated, by that one.
    """

    model: GPTModel
    head: Head
    embedder: Embedder
    tokens: int
    loss_factor: float
    detached: bool
    context_group: dist.ProcessGroup
    unnormed_SRD: torch.Tensor | None = None
    """One microbatch's hidden states before the final norm; None: the layers want those after it.
    """

    @classmethod
    def of(
        cls,
        model: GPTModel,
        head: Head | None,
        embedder: Embedder,
        settings: MegatronConfig,
        group: dist.ProcessGroup,
    ) -> MegatronMtp | None:
        """None without MTP layers, or on a rank without the head."""
        if head is None or not settings.mtp_num_layers:
            return None
        detached = settings.mtp_detach_heads
        return cls(
            model,
            head.plain.detached if detached else head.plain,
            embedder,
            settings.mtp_num_layers,
            settings.mtp_loss_scaling_factor,
            detached,
            group,
        )

    def after(self, taken: list[torch.Tensor]) -> MegatronMtp:
        """The same for the microbatch with which `before_final_norm` gave this list."""
        return replace(self, unnormed_SRD=taken[0]) if taken else self

    def hidden_states(self, hidden_SRD: torch.Tensor, microbatch: Microbatch) -> list[torch.Tensor]:
        layout, rank = microbatch.layout, self.context_group.rank()
        params = sequence_params(layout, self.context_group, self.embedder.positions(microbatch))
        block: Any = self.model.mtp_block
        angles = None
        if not self.model.config.multi_latent_attention:
            angles = self.model.rotary_pos_emb(layout.full_length if params is None else params)
        if self.unnormed_SRD is not None:
            hidden_SRD = self.unnormed_SRD
        if self.detached:
            hidden_SRD = hidden_SRD.detach()
        states = []
        for number in range(self.tokens):
            # In the caller's rows, so that a token never comes from another sequence.
            later_BS = shifted(microbatch.tokens_BS, number + 1)
            embedded_SRD = self.embedder.embed(layout.take(later_BS, rank).T.contiguous())
            if self.detached:
                embedded_SRD = embedded_SRD.detach()
            layer = block.layers[number % len(block.layers)]
            hidden_SRD = layer(hidden_SRD, embedded_SRD, angles, params)
            states.append(hidden_SRD)
        return states
