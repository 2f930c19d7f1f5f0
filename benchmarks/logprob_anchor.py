"""The baseline for ours: log-probabilities from hidden states, one chunk of tokens at a time.

It stands for existing fused paths: fp32 softmax of each chunk, and in the backward pass a one-hot
matrix of int64, several fp32 matrices of a chunk's logits, and matrix products in fp32.
Shapes: N tokens, C of a chunk, V vocabulary, D model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def plain_chunks(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int
) -> torch.Tensor:
    """fp32 `[N]`, differentiable with respect to hidden states and weights."""
    logprobs_N: torch.Tensor = _PlainChunks.apply(hidden_ND, weight_VD, targets_N, chunk)
    return logprobs_N


class _PlainChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.chunk = chunk
        parts = []
        for hidden_CD, targets_C in zip(
            hidden_ND.split(chunk), targets_N.split(chunk), strict=True
        ):
            logprobs_CV = _log_softmax(hidden_CD, weight_VD)
            parts.append(logprobs_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        grad_weight_VD = torch.zeros_like(weight_VD)
        parts = []
        for hidden_CD, targets_C, grad_C in zip(
            *(values.split(ctx.chunk) for values in (hidden_ND, targets_N, grad_N)), strict=True
        ):
            softmax_CV = _log_softmax(hidden_CD, weight_VD).exp()
            chosen_CV = F.one_hot(targets_C, weight_VD.size(0))
            grad_CV = (chosen_CV.float() - softmax_CV) * grad_C.unsqueeze(1)
            parts.append(grad_CV @ weight_VD.float())
            grad_weight_VD += grad_CV.T @ hidden_CD.float()
        return torch.cat(parts).to(hidden_ND.dtype), grad_weight_VD, None, None


def _log_softmax(hidden_CD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    logits_CV = (hidden_CD @ weight_VD.T).float()
    centred_CV = logits_CV - logits_CV.amax(1, keepdim=True)
    return centred_CV - centred_CV.exp().sum(1, keepdim=True).log()
