"""What is done with the products of a tile besides matrix products: the choice between two
implementations, and the one in torch. `triton_tiles.py` has the other, a kernel for each direction.

Shapes: N tokens, R rows and W entries of a tile or strip, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from megatron_policy.device import runs_triton
from megatron_policy.lm_head.filters import Bounds
from megatron_policy.lm_head.fused_tiles import (
    LOWEST,
    HeadShape,
    Known,
    MatrixBuffer,
    Sums,
    Tiling,
    VocabTile,
    buffer,
    calculation_dtype,
)

Implementation = Literal["torch", "triton"]

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TileWork(Protocol):
    """Work on the products `h.w` of a tile, `[R, W]`, for one head. All tensors are contiguous."""

    def add_logits(
        self,
        product_RW: torch.Tensor,
        tile: VocabTile,
        sums: Sums,
        local_NK: torch.Tensor,
        entropy: bool,
    ) -> None:
        """Add the tile's logits to `sums`, and take those of the targets in it. `local_NK` are the
        targets relative to this rank's slice of the vocabulary.
        """

    def to_gradient(self, product_RW: torch.Tensor, tile: VocabTile, known: Known) -> None:
        """Replace products by the gradient with respect to them."""


def choose_implementation(weight_VD: torch.Tensor, head: HeadShape) -> Implementation:
    """The implementation for a head with these weights: kernels wherever they run. They know of no
    filters, for which it is torch.
    """
    fits = head.filters is None and weight_VD.dtype in TRITON_DTYPES and runs_triton(weight_VD)
    return "triton" if fits else "torch"


def tile_work(
    implementation: Implementation,
    plan: Tiling,
    head: HeadShape,
    weight_VD: torch.Tensor,
    entropy: bool,
    bounds: Bounds | None = None,
    find: Callable[[torch.Tensor, int], Bounds] | None = None,
) -> TileWork:
    """The work of one pass over all tiles, with what memory it needs. `entropy`: whether the pass
    asks for the entropy, or its gradient. `bounds` are those of what is kept; `find` makes them of
    a strip's logits, whose entries begin at a number, when a tile comes first.
    """
    if implementation == "triton":
        assert bounds is None, "the kernels know of no filters"
        # Imported when it is chosen: Triton is not installed everywhere.
        from megatron_policy.lm_head.triton_tiles import TritonTiles

        return TritonTiles(head)
    return TorchTiles(plan, head, weight_VD, entropy, bounds, find)


class TorchTiles:
    """One operator after another on a strip of the tile, in buffers of the calculation's dtype."""

    def __init__(
        self,
        plan: Tiling,
        head: HeadShape,
        weight_VD: torch.Tensor,
        entropy: bool,
        bounds: Bounds | None,
        find: Callable[[torch.Tensor, int], Bounds] | None,
    ) -> None:
        self._plan, self._head, self._bounds, self._find = plan, head, bounds, find
        dtype, device = calculation_dtype(weight_VD), weight_VD.device
        self._work = buffer(plan.strip, plan.width, dtype, device)
        self._powers = buffer(plan.strip, plan.width, dtype, device) if entropy else self._work

    def add_logits(
        self,
        product_RW: torch.Tensor,
        tile: VocabTile,
        sums: Sums,
        local_NK: torch.Tensor,
        entropy: bool,
    ) -> None:
        for rows, inside in self._plan.strips(tile):
            logits_RW = finish_logits(product_RW[inside], self._head, self._work)
            if self._find is not None:
                assert self._bounds is not None, "what is found is kept"
                first = self._head.vocab_start + tile.entries.start
                self._bounds.fill(rows, self._find(logits_RW, first))
            dropped_RW = self._mask_dropped(logits_RW, rows, tile)
            if dropped_RW is not None:
                logits_RW.masked_fill_(dropped_RW, LOWEST)
            strip = sums.of(rows)
            index_RK, here_RK = _locate_targets(local_NK[rows], tile)
            found_RK = logits_RW.gather(1, index_RK)
            strip.target_NK.copy_(torch.where(here_RK, found_RK, strip.target_NK))
            strip.raise_peak(torch.maximum(strip.peak_N, logits_RW.amax(-1)))
            logits_RW.sub_(strip.peak_N.unsqueeze(1))
            # Overwrites the logits, unless the entropy is wanted.
            powers_RW = torch.exp(logits_RW, out=self._powers.view(*logits_RW.shape))
            strip.total_N.add_(powers_RW.sum(-1))
            if entropy:
                strip.moment_N.add_(logits_RW.mul_(powers_RW).sum(-1))

    def to_gradient(self, product_RW: torch.Tensor, tile: VocabTile, known: Known) -> None:
        for rows, inside in self._plan.strips(tile):
            product_RW[inside] = self._gradient(product_RW[inside], rows, tile, known)

    def _gradient(
        self, product_RW: torch.Tensor, rows: slice, tile: VocabTile, known: Known
    ) -> torch.Tensor:
        """The gradient with respect to the products `h.w` of a strip."""
        head = self._head
        logits_RW = finish_logits(product_RW, head, self._work)
        dropped_RW = self._mask_dropped(logits_RW, rows, tile)
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
            probabilities_RW = torch.exp(logits_RW, out=self._powers.view(*logits_RW.shape))
            grad_RW = logits_RW.add_(entropy_R1).mul_(of_entropy_R1).sub_(grad_R1)
            grad_RW.mul_(probabilities_RW)
        if dropped_RW is not None:
            grad_RW.masked_fill_(dropped_RW, 0.0)
        # Added, since targets can repeat: targets elsewhere add 0 at an arbitrary place.
        index_RK, here_RK = _locate_targets(known.local_NK[rows], tile)
        grad_RW.scatter_add_(1, index_RK, grad_RK * here_RK)
        return grad_RW if slope_RW is None else grad_RW.mul_(slope_RW)

    def _mask_dropped(
        self, logits_RW: torch.Tensor, rows: slice, tile: VocabTile
    ) -> torch.Tensor | None:
        """Where a strip's logits are not kept; None if everything is."""
        if self._bounds is None:
            return None
        first = self._head.vocab_start + tile.entries.start
        return self._bounds.of(rows).mask_dropped(logits_RW, first)


def finish_logits(product_RW: torch.Tensor, head: HeadShape, out: MatrixBuffer) -> torch.Tensor:
    """The logits `[R, W]` of products `h.w`."""
    logits_RW = out.view(*product_RW.shape).copy_(product_RW)
    if head.softcap is not None:
        logits_RW.mul_(head.scale / head.softcap).tanh_()
        return logits_RW.mul_(head.softcap / head.temperature)
    factor = head.scale / head.temperature
    return logits_RW if factor == 1.0 else logits_RW.mul_(factor)


def _locate_targets(local_RK: torch.Tensor, tile: VocabTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's index among the entries of a tile, int64 `[R, K]`, and whether it is there; the
    index of a target outside the tile has no meaning.
    """
    here_RK = (local_RK >= tile.entries.start) & (local_RK < tile.entries.stop)
    last = tile.entries.stop - tile.entries.start - 1
    return (local_RK - tile.entries.start).clamp(0, last), here_RK
