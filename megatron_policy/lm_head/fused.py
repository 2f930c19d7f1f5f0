"""Log-probabilities and entropies of a language-model head from hidden states, holding no more than
a tile of logits.

The softmax is computed tile by tile, with a running maximum and running sums; the backward pass
recomputes every tile. Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"; Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models".

Where the head has filters of sampling, a tile has all of this rank's entries of some tokens. What
is kept of a token is found when its tile is made, and found again from the same logits: another
tile's product could round differently, and put an entry on the other side of the bound.

Shapes: N tokens, V entries of this rank's slice of the vocabulary, D model, R rows and W entries of
a tile, K targets of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.lm_head.filters import Bounds, find_bounds, order_bits
from megatron_policy.lm_head.fused_tiles import (
    LOWEST,
    HeadShape,
    Known,
    MatrixBuffer,
    Sums,
    Tiling,
    buffer,
    calculation_dtype,
    multiply,
    row_tiling,
    tiling,
)
from megatron_policy.lm_head.tile_work import (
    Implementation,
    TileWork,
    choose_implementation,
    finish_logits,
    tile_work,
)

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
    in hidden states and weights, and the same on every rank of `group`. With filters the softmax is
    that of the kept logits; a target that is not kept has minus infinity and no gradient.

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
        implementation or choose_implementation(weight_VD, head),
    )
    if head.filters is not None:
        logprobs_NK = logprobs_NK.masked_fill(logprobs_NK < LOWEST / 2, -math.inf)
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
        plan = _tiling(hidden_ND, weight_VD, head, chunk)
        products = buffer(plan.height, plan.width, weight_VD.dtype, weight_VD.device)
        dtype, device = calculation_dtype(weight_VD), weight_VD.device
        bounds = find = None
        if head.filters is not None:
            bounds = Bounds.of_nothing(hidden_ND.size(0), dtype, device)
            vocab = weight_VD.size(0) * group.size()
            find = partial(find_bounds, vocab=vocab, filters=head.filters, group=group)
        work = tile_work(implementation, plan, head, weight_VD, entropy, bounds, find)
        sums = Sums.of_nothing(local_NK, dtype, device)
        for tile in chain.from_iterable(plan.columns()):
            product_RW = multiply(hidden_ND, weight_VD, tile, products)
            work.add_logits(product_RW, tile, sums, local_NK, entropy)
        if find is not None and not plan.real:
            # The other ranks search, and this one has to tell them that it has nothing.
            for rows in plan.strip_rows():
                find(torch.empty(rows.stop - rows.start, 0, dtype=dtype, device=device), 0)
        if group.size() > 1:
            _combine(sums, group)
        log_total_N = sums.total_N.log()
        entropy_N = log_total_N - sums.moment_N / sums.total_N if entropy else None
        ctx.save_for_backward(hidden_ND, weight_VD, local_NK, sums.peak_N + log_total_N, entropy_N)
        ctx.head, ctx.chunk, ctx.implementation = head, chunk, implementation
        ctx.bounds = bounds
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
        plan = _tiling(hidden_ND, weight_VD, ctx.head, ctx.chunk)
        of_entropy = grad_entropy_N is not None
        work = tile_work(ctx.implementation, plan, ctx.head, weight_VD, of_entropy, ctx.bounds)
        needed = ctx.needs_input_grad[:2]
        grads = _compute_gradients(hidden_ND, weight_VD, known, plan, work, needed, products)
        return *grads, None, None, None, None, None, None


def _combine(sums: Sums, group: dist.ProcessGroup) -> None:
    """Combine each rank's sums into those of the whole vocabulary."""
    peak_N = sums.peak_N.clone()
    dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=group)
    sums.raise_peak(peak_N)
    dist.all_reduce(sums.sums_MN, group=group)


def _compute_gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    known: Known,
    plan: Tiling,
    work: TileWork,
    needed: tuple[bool, bool],
    last: MatrixBuffer | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of `hidden_ND`, from this rank's slice alone, and of `weight_VD`, each if it is
    `needed`.

    Matrix products are in the weights' dtype; sums over tiles are in fp32. `last` can hold the
    products of the last tile, and is overwritten.
    """
    dtype, device = calculation_dtype(weight_VD), weight_VD.device
    products = last or buffer(plan.height, plan.width, weight_VD.dtype, device)
    # Of sums in another dtype; where one tile has all tokens, the gradient of its weights is none.
    height = plan.height if plan.tokens <= plan.height else max(plan.height, plan.width)
    height = 0 if weight_VD.dtype == dtype else height
    terms = buffer(height, hidden_ND.size(1), weight_VD.dtype, device)
    grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=dtype) if needed[0] else None
    grad_weight_VD = torch.empty_like(weight_VD) if needed[1] else None
    if grad_weight_VD is not None:
        grad_weight_VD[plan.real if plan.tokens else 0 :].zero_()
    for column in reversed(list(plan.columns())):
        total_WD = None
        for tile in reversed(column):
            hidden_RD, weight_WD = hidden_ND[tile.rows], weight_VD[tile.entries]
            if last is None:
                product_RW = multiply(hidden_ND, weight_VD, tile, products)
            else:
                product_RW, last = last.view(hidden_RD.size(0), weight_WD.size(0)), None
            work.to_gradient(product_RW, tile, known)
            if grad_hidden_ND is not None:
                _add_product(grad_hidden_ND[tile.rows], product_RW, weight_WD, terms)
            if grad_weight_VD is None:
                continue
            if len(column) == 1:
                torch.mm(product_RW.t(), hidden_RD, out=grad_weight_VD[tile.entries])
                continue
            if total_WD is None:
                total_WD = torch.zeros_like(weight_WD, dtype=dtype)
            _add_product(total_WD, product_RW.t(), hidden_RD, terms)
        if grad_weight_VD is not None and total_WD is not None:
            grad_weight_VD[column[0].entries] = total_WD
    if grad_hidden_ND is not None:
        grad_hidden_ND = grad_hidden_ND.to(hidden_ND.dtype)
    return grad_hidden_ND, grad_weight_VD


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, terms: MatrixBuffer
) -> None:
    """`total += left @ right`, by a matrix product in their dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right, out=terms.view(*total.shape)))


def _tiling(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, head: HeadShape, chunk: int
) -> Tiling:
    divide = tiling if head.filters is None else row_tiling
    return divide(hidden_ND.size(0), weight_VD.size(0), head.real, chunk)


NO_CANDIDATE = torch.iinfo(torch.int64).min


@torch.no_grad()
def fused_topk(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    k: int,
    head: HeadShape,
    group: dist.ProcessGroup,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest logits, fp32, and their entries of the vocabulary, int64: `[N, K]`, largest
    first, ties by the lowest entry; the same on every rank of `group`.

    `k` is at most the size of the vocabulary; not differentiable.
    """
    hidden_ND, device = hidden_ND.to(weight_VD.dtype), weight_VD.device
    plan = tiling(hidden_ND.size(0), weight_VD.size(0), head.real, chunk)
    products = buffer(plan.height, plan.width, weight_VD.dtype, device)
    work = buffer(plan.strip, plan.width, torch.float32, device)
    best_NK = torch.full((hidden_ND.size(0), k), NO_CANDIDATE, device=device)
    for tile in chain.from_iterable(plan.columns()):
        product_RW = multiply(hidden_ND, weight_VD, tile, products)
        for rows, inside in plan.strips(tile):
            logits_RW = finish_logits(product_RW[inside], head, work)
            # Keys are larger for larger logits and, for equal ones, for lower entries. No two are
            # equal, so that the result does not depend on the tiles or ranks that found them.
            bits_RW = logits_RW.add_(0.0).view(torch.int32)  # adding 0 makes -0 equal to 0
            first = head.vocab_start + tile.entries.start
            entries_W = torch.arange(first, first + logits_RW.size(1), device=device)
            keys_RW = order_bits(bits_RW).long().mul_(2**32).add_(2**32 - 1 - entries_W)
            found = keys_RW.topk(min(k, keys_RW.size(1))).values
            best_NK[rows] = torch.cat([best_NK[rows], found], dim=1).topk(k).values
    if group.size() > 1:
        parts = [torch.empty_like(best_NK) for _ in range(group.size())]
        dist.all_gather(parts, best_NK, group=group)
        best_NK = torch.cat(parts, dim=1).topk(k).values
    values_NK = order_bits((best_NK >> 32).int()).view(torch.float32)
    return values_NK, 2**32 - 1 - (best_NK & (2**32 - 1))
