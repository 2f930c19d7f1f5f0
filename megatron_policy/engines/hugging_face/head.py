"""The heads of transformers models: log-probabilities, entropies and top-k from hidden states
without materialised logits, or the logits.

Shapes: S positions, R parallel rows, N chosen positions, D model, V this rank's slice of the
vocabulary, K candidates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_policy.engines.hugging_face.tensor_regions import TensorRegion
from megatron_policy.lm_head.filters import Filters, find_bounds
from megatron_policy.lm_head.fused_tiles import PADDING_LOGIT, finish_whole_logits
from megatron_policy.lm_head.head import MatrixHead
from megatron_policy.lm_head.logprobs import gather_vocab


@dataclass(frozen=True)
class FusedHead(MatrixHead):
    """See `LanguageModelHead`: this rank computes its slice of the vocabulary, within
    `Decoder.forward`, where FSDP has gathered the weight.
    """

    linear: torch.nn.Module
    vocab: int
    """The entries of all ranks."""
    region: TensorRegion
    scalar: None = None

    @property
    def weight(self) -> torch.Tensor:
        """`[V, D]`."""
        weight = self.linear.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def whole(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        return hidden_SRD if self.region.size == 1 else self.region.enter(hidden_SRD, tokens=0)

    def logits(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        hidden_SRD = self.whole(hidden_SRD)
        products_SRV = F.linear(hidden_SRD.to(self.weight.dtype), self.weight)
        return finish_whole_logits(products_SRV.float(), self.shape)

    def next_logits(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """fp32 `[R, vocab]`: those after the last position, at temperature 1."""
        logits_RV = self.plain.logits(hidden_SRD[-1:])[0]
        return gather_vocab(logits_RV, self.region.group)[:, : self.vocab]

    def whole_sequences(self) -> AbstractContextManager[None]:
        """A context in which no rank has a share of the positions only."""
        return self.region.whole_sequences()

    def values(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """No language model has them."""
        raise AssertionError("only a scalar head has values")


class _Hidden(dict[str, Any]):
    """What a model's own code takes for the output of its decoder."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else super().get(key)


@dataclass(frozen=True)
class OwnHead:
    """See `LanguageModelHead`: what the model's own code makes of hidden states, for models whose
    logits are not known to be a product with one matrix. Tensor-parallel ranks compute the same. At
    most `chunk` tokens' logits are held at a time; the backward pass computes them again.
    """

    model: Any
    base: Any
    """The module whose output the model makes logits of."""
    vocab: int
    temperature: float
    filters: Filters | None
    region: TensorRegion
    chunk: int
    scalar: None = None

    def at(self, temperature: float) -> OwnHead:
        return replace(self, temperature=temperature)

    @property
    def plain(self) -> OwnHead:
        return replace(self, temperature=1.0, filters=None)

    @property
    def unfiltered(self) -> OwnHead:
        return self if self.filters is None else replace(self, filters=None)

    def whole(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        return hidden_SRD

    def logits(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        logits_SRV, ranks = self._logits(hidden_SRD), self.region.size
        if ranks == 1:
            return logits_SRV
        padding = -self.vocab % ranks
        return self.region.own_features(F.pad(logits_SRV, (0, padding), value=PADDING_LOGIT))

    def _logits(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """fp32 `[S, R, vocab]`: those of all entries."""
        base, forward = self.base, self.base.forward
        asked = []

        def given(*args: Any, **kwargs: Any) -> _Hidden:
            asked.append(args)
            return _Hidden(hidden_SRD.transpose(0, 1))

        tokens_RS = torch.zeros(
            hidden_SRD.size(1), hidden_SRD.size(0), dtype=torch.long, device=hidden_SRD.device
        )
        base.forward = given
        try:
            logits_RSV = self.model.forward(tokens_RS, use_cache=False).logits
        finally:
            base.forward = forward
        assert len(asked) == 1, f"{type(self.model).__name__} has not asked its decoder once"
        logits_SRV: torch.Tensor = logits_RSV.transpose(0, 1)[..., : self.vocab].float()
        return logits_SRV / self.temperature

    def scores(
        self, hidden_ND: torch.Tensor, targets: torch.Tensor, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        wanted_NK = targets if targets.dim() == 2 else targets.unsqueeze(1)
        parts = [
            checkpoint(self._scores, hidden, wanted, use_reentrant=False)
            for hidden, wanted in zip(
                hidden_ND.split(self.chunk), wanted_NK.split(self.chunk), strict=True
            )
        ]
        found_NK, entropy_N = (torch.cat(each) for each in zip(*parts, strict=True))
        return found_NK.view(targets.shape), entropy_N if entropy else None

    def _scores(
        self, hidden_ND: torch.Tensor, wanted_NK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NV = self._logits(hidden_ND.unsqueeze(1)).squeeze(1)
        if self.filters is not None and len(logits_NV):
            bounds = find_bounds(logits_NV.detach(), 0, self.vocab, self.filters)
            logits_NV = logits_NV.masked_fill(
                bounds.mask_dropped(logits_NV.detach(), 0), -torch.inf
            )
        logprobs_NV = logits_NV.log_softmax(-1)
        kept_NV = logprobs_NV.masked_fill(logprobs_NV == -torch.inf, 0.0)
        return logprobs_NV.gather(-1, wanted_NK), -(logprobs_NV.exp() * kept_NV).sum(-1)

    def topk(self, hidden_ND: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            self._logits(hidden.unsqueeze(1)).squeeze(1).topk(k)
            for hidden in hidden_ND.split(self.chunk)
        ]
        values, entries = zip(*parts, strict=True)
        return torch.cat(values), torch.cat(entries)

    def next_logits(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """fp32 `[R, vocab]`: those after the last position, at temperature 1."""
        return self.plain._logits(hidden_SRD[-1:])[0]

    def whole_sequences(self) -> AbstractContextManager[None]:
        """A context in which no rank has a share of the positions only, which is always so."""
        return nullcontext()

    def values(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        """No language model has them."""
        raise AssertionError("only a scalar head has values")
