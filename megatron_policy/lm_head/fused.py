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
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.lm_head.fused_gradients import gradients
from megatron_policy.lm_head.fused_tiles import (
    HeadShape,
    Known,
    MatrixBuffer,
    Sums,
    Tiling,
    buffer,
    calculation_dtype,
    multiply,
    tiling,
)
from megatron_policy.lm_head.fused_topk import fused_topk
from megatron_policy.lm_head.tile_work import Implementation, TileWork, chosen, tile_work

__all__ = ["HeadShape", "fused_scores", "fused_topk"]


def fused_scores(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets: torch.Tensor,
    head: HeadShape,
    group: dist.ProcessGroup,
    chunk: int,
    entropy: bool = False,
    implementation: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 `log softmax(logits)[target]` for targets `[N]`, or for several per token `[N, K]` in
    that shape, and optionally the entropy of that softmax in nats, `[N]`. Both are differentiable
    in hidden states and weights, and the same on every rank of `group`.

    `weight_VD` is this rank's slice; `hidden_ND` and `targets`, int64 entries of the whole
    vocabulary, are the same on every rank. A token's targets can repeat. At most `chunk * V` logits
    are held at a time. The backward pass expects the gradient of the same loss on every rank. It
    returns the full gradient of this rank's weights and its share of the hidden states' gradient,
    which the caller sums over the group.

    `implementation` names what does the elementwise work on tiles, in place of what the device and
    dtype of the weights choose.
    """
    several = targets.ndim > 1
    targets_NK = targets if several else targets.unsqueeze(1)
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _FusedScores.apply
    logprobs_NK, entropy_N = apply(
        hidden_ND.to(weight_VD.dtype),
        weight_VD,
        targets_NK,
        head,
        group,
        chunk,
        entropy,
        implementation or chosen(weight_VD),
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
        implementation: Implementation,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        local_NK = (targets_NK - head.vocab_start).contiguous()
        plan = tiling(hidden_ND.size(0), weight_VD.size(0), head.real, chunk)
        products = buffer(plan.height, plan.width, weight_VD.dtype, weight_VD.device)
        work = tile_work(implementation, plan, head, weight_VD, entropy)
        sums = _local_sums(hidden_ND, weight_VD, local_NK, plan, products, work, entropy)
        if group.size() > 1:
            _combine(sums, group)
        log_total_N = sums.total_N.log()
        entropy_N = log_total_N - sums.moment_N / sums.total_N if entropy else None
        ctx.save_for_backward(hidden_ND, weight_VD, local_NK, sums.peak_N + log_total_N, entropy_N)
        ctx.head, ctx.chunk, ctx.implementation = head, chunk, implementation
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
        if grad_entropy_N is not None:
            grad_entropy_N = grad_entropy_N.contiguous()
        grad_logprobs_NK = grad_logprobs_NK.contiguous()
        known = Known(normaliser_N, local_NK, grad_logprobs_NK, entropy_N, grad_entropy_N)
        products, ctx.products = ctx.products, None  # overwritten below: valid for one pass
        plan = tiling(hidden_ND.size(0), weight_VD.size(0), ctx.head.real, ctx.chunk)
        of_entropy = grad_entropy_N is not None
        work = tile_work(ctx.implementation, plan, ctx.head, weight_VD, of_entropy)
        needed = ctx.needs_input_grad[:2]
        grads = gradients(hidden_ND, weight_VD, known, plan, work, needed, products)
        return *grads, None, None, None, None, None, None


def _local_sums(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    local_NK: torch.Tensor,
    plan: Tiling,
    products: MatrixBuffer,
    work: TileWork,
    entropy: bool,
) -> Sums:
    """Sums over this rank's slice of the vocabulary; leaves the last tile in `products`."""
    sums = Sums.of_nothing(local_NK, calculation_dtype(weight_VD), weight_VD.device)
    for column in plan.columns():
        for tile in column:
            product_RW = multiply(hidden_ND, weight_VD, tile, products)
            work.add_logits(product_RW, tile, sums, local_NK, entropy)
    return sums


def _combine(sums: Sums, group: dist.ProcessGroup) -> None:
    """Combine each rank's sums into those of the whole vocabulary."""
    peak_N = sums.peak_N.clone()
    dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=group)
    sums.raise_peak(peak_N)
    dist.all_reduce(sums.sums_MN, group=group)
