"""What the last stage computes from hidden states: log-probabilities, entropies and top-k without
materialised logits, or the logits; from a scalar head one number for each token.

Shapes: S positions (this tensor-parallel rank's share under sequence parallelism), R parallel rows,
N chosen positions, D model, V this rank's slice of the vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.engines.megatron.layers.norm import replicated
from megatron_policy.lm_head.fused_tiles import finish_whole_logits
from megatron_policy.lm_head.head import MatrixHead


class ScalarLayer(torch.nn.Module):
    """A linear layer from hidden states to one number each. Every tensor-parallel rank holds all of
    it and applies it to its own positions, in fp32.
    """

    def __init__(self, config: TransformerConfig, with_bias: bool) -> None:
        super().__init__()
        self.weight = replicated(config, 1, config.hidden_size)
        self.bias = replicated(config, 1) if with_bias else None

    def forward(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden_SRD.float(), self.weight.float(), bias).squeeze(-1)


@dataclass(frozen=True)
class Head(MatrixHead):
    """The head of the chunk that ends the pipeline: a language model's or, with only `values`, a
    scalar one.

    Logits are at the policy's temperature, and scores of what its filters keep: rollouts are drawn
    from that distribution, so its log-probabilities are the relevant ones.
    """

    model: GPTModel
    overlapped: bool = False
    """Whether an overlapped parameter gather of its weight can still be running."""
    frozen: bool = False
    """Whether `scores` have no gradient with respect to the weight."""

    @property
    def scalar(self) -> ScalarHead | None:
        """What it is if it gives one number for each token."""
        layer = self.model.output_layer
        if not isinstance(layer, ScalarLayer):
            return None
        return ScalarHead(per_token=layer.bias is not None)

    def values(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """fp32 `[S, R]`: a scalar head's numbers of all positions of this context-parallel rank,
        differentiable; the same on every tensor-parallel rank.
        """
        values_SR: torch.Tensor = self.model.output_layer(hidden_SRD)
        if self.model.config.sequence_parallel:
            # All ranks go on to compute the same loss, so each takes its own part of the gradient.
            values_SR = gather_from_sequence_parallel_region(
                values_SR, tensor_parallel_output_grad=False
            )
        return values_SR

    @property
    def detached(self) -> Head:
        """The same head, whose weight `scores` do not train."""
        return replace(self, frozen=True)

    @property
    def weight(self) -> torch.Tensor:
        """`[V, D]`; the embedding's weight if they are tied and on the same stage."""
        weight: torch.Tensor
        if self.model.share_embeddings_and_output_weights:
            weight = self.model.shared_embedding_or_output_weight()
        else:
            weight = self.model.output_layer.weight
        return weight.detach() if self.frozen else weight

    def whole(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """Hidden states of all positions of this context-parallel rank, ready for `scores`; the
        backward pass sums the tensor-parallel ranks' gradients.
        """
        if self.overlapped:
            with torch.no_grad():  # a hook of the module that holds the weight finishes the gather
                self.logits(hidden_SRD[:0])
        if self.model.output_layer.sequence_parallel:
            whole: torch.Tensor = gather_from_sequence_parallel_region(hidden_SRD)
            return whole
        copied: torch.Tensor = copy_to_tensor_model_parallel_region(hidden_SRD)
        return copied

    def logits(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """fp32 `[S, R, V]` of all positions of this context-parallel rank; padding entries of the
        vocabulary have probability 0.
        """
        weight = self.weight if self.model.share_embeddings_and_output_weights else None
        logits_SRV: torch.Tensor
        logits_SRV, _ = self.model.output_layer(hidden_SRD, weight=weight)
        return finish_whole_logits(logits_SRV.float(), self.shape)
