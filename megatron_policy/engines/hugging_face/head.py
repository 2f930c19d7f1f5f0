"""The head of a transformers model: log-probabilities, entropies and top-k from hidden states
without materialised logits, or the logits.

Shapes: S positions, R parallel rows, N chosen positions, D model, V vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_policy.lm_head.fused import HeadShape, fused_scores, fused_topk


@dataclass(frozen=True)
class WholeHead:
    """See `LanguageModelHead`: this rank computes all of the vocabulary, within `Decoder.forward`,
    where the weight is unsharded.
    """

    linear: torch.nn.Module
    shape: HeadShape
    group: dist.ProcessGroup
    """Of this rank alone."""
    chunk: int
    scalar: None = None

    @property
    def plain(self) -> WholeHead:
        """See `LanguageModelHead`."""
        return replace(self, shape=replace(self.shape, temperature=1.0, filters=None))

    @property
    def unfiltered(self) -> WholeHead:
        """See `LanguageModelHead`."""
        if self.shape.filters is None:
            return self
        return replace(self, shape=replace(self.shape, filters=None))

    @property
    def weight(self) -> torch.Tensor:
        """`[V, D]`."""
        weight = self.linear.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def whole(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """See `LanguageModelHead`."""
        return hidden_SRD

    def scores(
        self, hidden_ND: torch.Tensor, targets: torch.Tensor, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `LanguageModelHead`."""
        return fused_scores(
            hidden_ND, self.weight, targets, self.shape, self.group, self.chunk, entropy
        )

    def topk(self, hidden_ND: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LanguageModelHead`."""
        found: tuple[torch.Tensor, torch.Tensor] = fused_topk(
            hidden_ND, self.weight, k, self.shape, self.group, self.chunk
        )
        return found

    def logits(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """See `LanguageModelHead`."""
        logits_SRV = F.linear(hidden_SRD.to(self.weight.dtype), self.weight).float()
        shape = self.shape
        if shape.scale != 1.0:
            logits_SRV.mul_(shape.scale)
        if shape.softcap is not None:
            logits_SRV = logits_SRV.div_(shape.softcap).tanh_() * shape.softcap
        if shape.temperature != 1.0:
            logits_SRV.div_(shape.temperature)
        return logits_SRV

    def values(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """No language model has them."""
        raise AssertionError("only a scalar head has values")
