"""Log-probabilities and entropies of a language-model head from hidden states, holding no more than
a tile of logits.

The softmax is computed tile by tile, with a running maximum and running sums; the backward pass
recomputes every tile. Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"; Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models".

Shapes: N tokens, V entries of this rank's slice of the vocabulary, D model, R rows and W entries of
a tile, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.lm_head.fused_gradients import Known, gradients
from megatron_policy.lm_head.fused_tiles import (
    HeadShape,
    MatrixBuffer,
    Tiling,
    VocabTile,
    buffer,
    calculation_dtype,
    finish_logits,
    multiply,
    place_of_targets,
    tiling,
)
from megatron_policy.lm_head.fused_topk import fused_topk

__all__ = ["HeadShape", "fused_scores", "fused_topk"]

# Below any logit, and yet finite: infinity minus infinity is NaN.
LOWEST = -1e30


def fused_scores(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets: torch.Tensor,
    head: HeadShape,
    group: dist.ProcessGroup,
    chunk: int,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 `log softmax(logits)[target]` for targets `[N]`, or for several per token `[N, K]` in
    that shape, and optionally the entropy of that softmax in nats, `[N]`. Both are differentiable
    in hidden states and weights, and the same on every rank of `group`.

    `weight_VD` is this rank's slice; `hidden_ND` and `targets`, int64 entries of the whole
    vocabulary, are the same on every rank. A token's targets can repeat. At most `chunk * V` logits
    are held at a time. The backward pass expects the gradient of the same loss on every rank. It
    returns the full gradient of this rank's weights and its share of the hidden states' gradient,
    which the caller sums over the group.
    """
    several = targets.ndim > 1
    targets_NK = targets if several else targets.unsqueeze(1)
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _FusedScores.apply
    logprobs_NK, entropy_N = apply(
        hidden_ND.to(weight_VD.dtype), weight_VD, targets_NK, head, group, chunk, entropy
    )
    return logprobs_NK if several else logprobs_NK.squeeze(1), entropy_N


class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_NK: torch.Tensor,
        head: HeadShape,
        group: dist.ProcessGroup,
        chunk: int,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        local_NK = targets_NK - head.vocab_start
        plan = tiling(hidden_ND.size(0), weight_VD.size(0), head.real, chunk)
        products = buffer(plan.height, plan.width, weight_VD.dtype, weight_VD.device)
        sums = _local_sums(hidden_ND, weight_VD, local_NK, head, plan, products, entropy)
        if group.size() > 1:
            _combine(sums, group)
        log_total_N = sums.total_N.log()
        entropy_N = log_total_N - sums.moment_N / sums.total_N if entropy else None
        ctx.save_for_backward(hidden_ND, weight_VD, local_NK, sums.peak_N + log_total_N, entropy_N)
        ctx.head, ctx.chunk = head, chunk
        # The backward pass reuses the last tile's products; if there is only one, none is redone.
        ctx.products = products if any(ctx.needs_input_grad[:2]) else None
        ctx.set_materialize_grads(False)
        return sums.target_NK - sums.peak_N.unsqueeze(1) - log_total_N.unsqueeze(1), entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_NK: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, local_NK, normaliser_N, entropy_N = ctx.saved_tensors
        if grad_logprobs_NK is None:
            grad_logprobs_NK = torch.zeros_like(local_NK, dtype=normaliser_N.dtype)
        known = Known(normaliser_N, local_NK, grad_logprobs_NK, entropy_N, grad_entropy_N)
        products, ctx.products = ctx.products, None  # overwritten below: valid for one pass
        grad_hidden, grad_weight = gradients(
            hidden_ND, weight_VD, known, ctx.head, ctx.chunk, ctx.needs_input_grad[:2], products
        )
        return grad_hidden, grad_weight, None, None, None, None, None


@dataclass(frozen=True)
class _Sums:
    """Running statistics of each token's logits l, updated in place: the maximum (`peak`), the sums
    of `exp(l - peak)` and of `exp(l - peak) * (l - peak)`, and each target's logit, 0 until it is
    seen: M = 2 + K sums.
    """

    peak_N: torch.Tensor
    sums_MN: torch.Tensor

    @property
    def total_N(self) -> torch.Tensor:
        return self.sums_MN[0]

    @property
    def moment_N(self) -> torch.Tensor:
        return self.sums_MN[1]

    @property
    def target_NK(self) -> torch.Tensor:
        return self.sums_MN[2:].t()

    def of(self, rows: slice) -> _Sums:
        return _Sums(self.peak_N[rows], self.sums_MN[:, rows])

    def raise_peak(self, peak_N: torch.Tensor) -> None:
        """Rescale the sums to a peak that is at least as large."""
        difference_N = self.peak_N - peak_N
        self.moment_N.addcmul_(difference_N, self.total_N)
        self.sums_MN[:2].mul_(difference_N.exp_())
        self.peak_N.copy_(peak_N)


def _local_sums(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    local_NK: torch.Tensor,
    head: HeadShape,
    plan: Tiling,
    products: MatrixBuffer,
    entropy: bool,
) -> _Sums:
    """Sums over this rank's slice of the vocabulary; leaves the last tile in `products`."""
    dtype, device = calculation_dtype(weight_VD), weight_VD.device
    work = buffer(plan.strip, plan.width, dtype, device)
    powers = buffer(plan.strip, plan.width, dtype, device) if entropy else work
    tokens, targets = local_NK.shape
    peak_N = torch.full((tokens,), LOWEST, dtype=dtype, device=device)
    sums = _Sums(peak_N, torch.zeros(2 + targets, tokens, dtype=dtype, device=device))
    for column in plan.columns():
        for tile in column:
            product_RW = multiply(hidden_ND, weight_VD, tile, products)
            for rows, inside in plan.strips(tile):
                logits_RW = finish_logits(product_RW[inside], head, work)
                strip = sums.of(rows)
                _take_targets(strip, logits_RW, local_NK[rows], tile)
                _add_logits(strip, logits_RW, powers.view(*logits_RW.shape), entropy)
    return sums


def _take_targets(
    sums: _Sums, logits_RW: torch.Tensor, local_RK: torch.Tensor, tile: VocabTile
) -> None:
    index_RK, here_RK = place_of_targets(local_RK, tile)
    found_RK = logits_RW.gather(1, index_RK)
    sums.target_NK.copy_(torch.where(here_RK, found_RK, sums.target_NK))


def _add_logits(
    sums: _Sums, logits_RW: torch.Tensor, powers_RW: torch.Tensor, entropy: bool
) -> None:
    """Overwrites both matrices, which can be the same one unless the entropy is wanted."""
    sums.raise_peak(torch.maximum(sums.peak_N, logits_RW.amax(-1)))
    logits_RW.sub_(sums.peak_N.unsqueeze(1))
    torch.exp(logits_RW, out=powers_RW)
    sums.total_N.add_(powers_RW.sum(-1))
    if entropy:
        sums.moment_N.add_(logits_RW.mul_(powers_RW).sum(-1))


def _combine(sums: _Sums, group: dist.ProcessGroup) -> None:
    """Combine each rank's sums into those of the whole vocabulary."""
    peak_N = sums.peak_N.clone()
    dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=group)
    sums.raise_peak(peak_N)
    dist.all_reduce(sums.sums_MN, group=group)
