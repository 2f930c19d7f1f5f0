"""Gradients of log-probabilities and entropies with respect to a head's hidden states and weights,
one tile of logits at a time.

Shapes: N tokens, V entries of this rank's slice of the vocabulary, D model, R rows and W entries of
a tile, K targets of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_policy.lm_head.fused_tiles import (
    Known,
    MatrixBuffer,
    Tiling,
    buffer,
    calculation_dtype,
    multiply,
)
from megatron_policy.lm_head.tile_work import TileWork


def gradients(
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
    buffers = _buffers(plan, hidden_ND, weight_VD, last)
    dtype = calculation_dtype(weight_VD)
    grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=dtype) if needed[0] else None
    grad_weight_VD = torch.empty_like(weight_VD) if needed[1] else None
    if grad_weight_VD is not None:
        grad_weight_VD[plan.real if plan.tokens else 0 :].zero_()
    for column in reversed(list(plan.columns())):
        total_WD = None
        for tile in reversed(column):
            hidden_RD, weight_WD = hidden_ND[tile.rows], weight_VD[tile.entries]
            if last is None:
                product_RW = multiply(hidden_ND, weight_VD, tile, buffers.products)
            else:
                product_RW, last = last.view(hidden_RD.size(0), weight_WD.size(0)), None
            work.to_gradient(product_RW, tile, known)
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
    """Buffers for a tile's products and then their gradient, and for terms of sums."""

    products: MatrixBuffer
    terms: MatrixBuffer


def _buffers(
    plan: Tiling, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, products: MatrixBuffer | None
) -> _Buffers:
    dtype, device = weight_VD.dtype, weight_VD.device
    exact = calculation_dtype(weight_VD)
    # Where one tile has all tokens, the gradient of its weights is not a sum.
    terms = plan.height if plan.tokens <= plan.height else max(plan.height, plan.width)
    terms = 0 if dtype == exact else terms
    return _Buffers(
        products=products or buffer(plan.height, plan.width, dtype, device),
        terms=buffer(terms, hidden_ND.size(1), dtype, device),
    )


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, terms: MatrixBuffer
) -> None:
    """`total += left @ right`, by a matrix product in their dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right, out=terms.view(*total.shape)))
