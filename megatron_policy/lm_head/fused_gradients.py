"""Gradients of log-probabilities and entropies with respect to a head's hidden states and weights,
one tile of logits at a time.

Shapes: N tokens, V entries of this rank's slice of the vocabulary, D model, R rows and W entries of
a tile, K targets of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


@dataclass(frozen=True)
class Known:
    """What the forward pass has saved, and the loss's gradients with respect to its two results.

    `local_NK` are the targets relative to this rank's slice, outside it for those of other
    ranks. Without `grad_entropy_N` the loss does not depend on the entropy.
    """

    normaliser_N: torch.Tensor
    local_NK: torch.Tensor
    grad_logprobs_NK: torch.Tensor
    entropy_N: torch.Tensor | None
    grad_entropy_N: torch.Tensor | None


def gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    known: Known,
    head: HeadShape,
    chunk: int,
    needed: tuple[bool, bool],
    last: MatrixBuffer | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of `hidden_ND`, from this rank's slice alone, and of `weight_VD`, each if it is
    `needed`.

    Matrix products are in the weights' dtype; sums over tiles are in fp32. `last` can hold the
    products of the last tile, and is overwritten.
    """
    plan = tiling(hidden_ND.size(0), weight_VD.size(0), head.real, chunk)
    buffers = _buffers(plan, hidden_ND, weight_VD, last)
    dtype = calculation_dtype(weight_VD)
    grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=dtype) if needed[0] else None
    grad_weight_VD = torch.empty_like(weight_VD) if needed[1] else None
    if grad_weight_VD is not None:
        grad_weight_VD[head.real if plan.tokens else 0 :].zero_()
    for column in reversed(list(plan.columns())):
        total_WD = None
        for tile in reversed(column):
            hidden_RD, weight_WD = hidden_ND[tile.rows], weight_VD[tile.entries]
            if last is None:
                product_RW = multiply(hidden_ND, weight_VD, tile, buffers.products)
            else:
                product_RW, last = last.view(hidden_RD.size(0), weight_WD.size(0)), None
            for rows, inside in plan.strips(tile):
                grad_RW = _of_logits(product_RW[inside], rows, tile, known, head, buffers.work)
                product_RW[inside] = grad_RW
            if grad_hidden_ND is not None:
                _add_product(grad_hidden_ND[tile.rows], product_RW, weight_WD, buffers.terms)
            if grad_weight_VD is None:
                continue
            if len(column) == 1:
                torch.mm(product_RW.t(), hidden_RD, out=grad_weight_VD[tile.entries])
                continue
            if total_WD is None:
                total_WD = torch.zeros_like(weight_WD, dtype=dtype)
            _add_product(total_WD, product_RW.t(), hidden_RD, buffers.terms)
        if grad_weight_VD is not None and total_WD is not None:
            grad_weight_VD[column[0].entries] = total_WD
    if grad_hidden_ND is not None:
        grad_hidden_ND = grad_hidden_ND.to(hidden_ND.dtype)
    return grad_hidden_ND, grad_weight_VD


@dataclass(frozen=True)
class _Buffers:
    """Buffers for a tile's products and then their gradient, for elementwise work on a strip of it,
    and for terms of sums.
    """

    products: MatrixBuffer
    work: MatrixBuffer
    terms: MatrixBuffer


def _buffers(
    plan: Tiling, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, products: MatrixBuffer | None
) -> _Buffers:
    dtype, device = weight_VD.dtype, weight_VD.device
    exact = calculation_dtype(weight_VD)
    terms = 0 if dtype == exact else max(plan.height, plan.width)
    return _Buffers(
        products=products or buffer(plan.height, plan.width, dtype, device),
        work=buffer(plan.strip, plan.width, exact, device),
        terms=buffer(terms, hidden_ND.size(1), dtype, device),
    )


def _of_logits(
    product_RW: torch.Tensor,
    rows: slice,
    tile: VocabTile,
    known: Known,
    head: HeadShape,
    work: MatrixBuffer,
) -> torch.Tensor:
    """The gradient with respect to the products `h.w` of a strip."""
    logits_RW = finish_logits(product_RW, head, work)
    slope_RW = None
    if head.softcap is not None:
        capped_RW = logits_RW * (head.temperature / head.softcap)
        slope_RW = capped_RW.square_().neg_().add_(1)
    factor = head.scale / head.temperature
    grad_RK = known.grad_logprobs_NK[rows] * factor
    grad_R1 = grad_RK.sum(1, keepdim=True)
    normaliser_R1 = known.normaliser_N[rows].unsqueeze(1)
    if known.grad_entropy_N is None:
        # d log p(target) / d logit j = (j is the target) - p(j), for each of the targets
        grad_RW = logits_RW.sub_(normaliser_R1).exp_().mul_(-grad_R1)
    else:
        # d H / d logit j = -p(j) (log p(j) + H)
        assert known.entropy_N is not None
        entropy_R1 = known.entropy_N[rows].unsqueeze(1)
        of_entropy_R1 = known.grad_entropy_N[rows].unsqueeze(1) * -factor
        logits_RW.sub_(normaliser_R1)
        probabilities_RW = logits_RW.exp()
        grad_RW = logits_RW.add_(entropy_R1).mul_(of_entropy_R1).sub_(grad_R1)
        grad_RW.mul_(probabilities_RW)
    # Added, since targets can repeat: targets elsewhere add 0 at an arbitrary place.
    index_RK, here_RK = place_of_targets(known.local_NK[rows], tile)
    grad_RW.scatter_add_(1, index_RK, grad_RK * here_RK)
    return grad_RW if slope_RW is None else grad_RW.mul_(slope_RW)


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, terms: MatrixBuffer
) -> None:
    """`total += left @ right`, by a matrix product in their dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right, out=terms.view(*total.shape)))
