"""Work on the products of a tile in one kernel for each direction: one reads every product once,
the other also writes its gradient in its place. The only module that imports Triton.

A program works on one row of the tile, a block of entries at a time, in fp32. The kernels are
operators of torch, which makes them known to its fake tensors.

Shapes: N tokens, R rows and W entries of a tile, B entries of a block, K targets of a token, M sums
of a token as in `Sums`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_policy.lm_head.fused_tiles import LOWEST, HeadShape, Known, Sums, VocabTile

BLOCK = 4096
TARGETS = 64
"""Targets of a token that are looked up at once, at most."""

WARPS = 8

_LOWEST = tl.constexpr(LOWEST)


class TritonTiles:
    """`TileWork` of weights in fp32, bf16 or fp16 on a GPU."""

    def __init__(self, head: HeadShape) -> None:
        self._factor = head.scale / head.temperature
        self._gain, self._cap = self._factor, None
        if head.softcap is not None:
            self._gain, self._cap = head.scale / head.softcap, head.softcap / head.temperature

    def add_logits(
        self,
        product_RW: torch.Tensor,
        tile: VocabTile,
        sums: Sums,
        local_NK: torch.Tensor,
        entropy: bool,
    ) -> None:
        start = tile.rows.start, tile.entries.start
        statistics = sums.peak_N, sums.sums_MN
        _add_logits(product_RW, *statistics, local_NK, *start, self._gain, self._cap, entropy)

    def to_gradient(self, product_RW: torch.Tensor, tile: VocabTile, known: Known) -> None:
        _to_gradient(
            product_RW,
            known.normaliser_N,
            known.local_NK,
            known.grad_logprobs_NK,
            known.entropy_N,
            known.grad_entropy_N,
            tile.rows.start,
            tile.entries.start,
            self._factor,
            self._gain,
            self._cap,
        )


@torch.library.custom_op(
    "megatron_policy::add_logits",
    mutates_args=("peak_N", "sums_MN"),
    schema="(Tensor product_RW, Tensor(a!) peak_N, Tensor(b!) sums_MN, Tensor local_NK, "
    "int first_row, int first_entry, float gain, float? cap, bool entropy) -> ()",
)
def _add_logits(
    product_RW: torch.Tensor,
    peak_N: torch.Tensor,
    sums_MN: torch.Tensor,
    local_NK: torch.Tensor,
    first_row: int,
    first_entry: int,
    gain: float,
    cap: float | None,
    entropy: bool,
) -> None:
    (rows, width), (tokens, targets) = product_RW.shape, local_NK.shape
    add_logits_kernel[(rows,)](
        product_RW,
        peak_N,
        sums_MN,
        local_NK,
        first_row,
        first_entry,
        width,
        tokens,
        targets,
        gain,
        cap or 1.0,
        CAPPED=cap is not None,
        ENTROPY=entropy,
        BLOCK=BLOCK,
        TARGETS=min(TARGETS, triton.next_power_of_2(max(targets, 1))),
        num_warps=WARPS,
    )


@torch.library.custom_op(
    "megatron_policy::to_gradient",
    mutates_args=("product_RW",),
    schema="(Tensor(a!) product_RW, Tensor normaliser_N, Tensor local_NK, Tensor grad_logprobs_NK, "
    "Tensor? entropy_N, Tensor? grad_entropy_N, int first_row, int first_entry, float factor, "
    "float gain, float? cap) -> ()",
)
def _to_gradient(
    product_RW: torch.Tensor,
    normaliser_N: torch.Tensor,
    local_NK: torch.Tensor,
    grad_logprobs_NK: torch.Tensor,
    entropy_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    first_row: int,
    first_entry: int,
    factor: float,
    gain: float,
    cap: float | None,
) -> None:
    (rows, width), targets = product_RW.shape, local_NK.size(1)
    to_gradient_kernel[(rows,)](
        product_RW,
        normaliser_N,
        local_NK,
        grad_logprobs_NK,
        normaliser_N if entropy_N is None else entropy_N,  # neither is read without its gradient
        normaliser_N if grad_entropy_N is None else grad_entropy_N,
        first_row,
        first_entry,
        width,
        targets,
        factor,
        gain,
        cap or 1.0,
        CAPPED=cap is not None,
        ENTROPY=grad_entropy_N is not None,
        BLOCK=BLOCK,
        TARGETS=min(TARGETS, triton.next_power_of_2(max(targets, 1))),
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["first_row", "first_entry"])
def add_logits_kernel(
    product_RW,
    peak_N,
    sums_MN,
    local_NK,
    first_row,
    first_entry,
    width,
    tokens,
    targets,
    gain,
    cap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    TARGETS: tl.constexpr,
):
    """Adds the logits of one row to its running sums."""
    row = tl.program_id(0).to(tl.int64)
    token = first_row + row
    product_W = product_RW + row * width
    before = tl.load(peak_N + token)
    peak = before
    total_B = tl.full((BLOCK,), 0.0, tl.float32)
    moment_B = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, width, BLOCK):
        place_B = first + tl.arange(0, BLOCK)
        product_B = tl.load(product_W + place_B, mask=place_B < width, other=0.0)
        logits_B = _bounded(product_B, gain, CAPPED) * cap
        logits_B = tl.where(place_B < width, logits_B, _LOWEST)  # whose power is 0
        higher = tl.maximum(peak, tl.max(logits_B, 0))
        fall = peak - higher
        logits_B -= higher
        power_B = tl.exp(logits_B)
        if ENTROPY:
            moment_B = (moment_B + fall * total_B) * tl.exp(fall) + power_B * logits_B
        total_B = total_B * tl.exp(fall) + power_B
        peak = higher
    fall = before - peak
    total = tl.load(sums_MN + token)
    if ENTROPY:
        moment = tl.load(sums_MN + tokens + token)
        moment = (moment + fall * total) * tl.exp(fall) + tl.sum(moment_B, 0)
        tl.store(sums_MN + tokens + token, moment)
    tl.store(sums_MN + token, total * tl.exp(fall) + tl.sum(total_B, 0))
    tl.store(peak_N + token, peak)
    for first in range(0, targets, TARGETS):
        target_K = (first + tl.arange(0, TARGETS)).to(tl.int64)
        local_K = tl.load(local_NK + token * targets + target_K, mask=target_K < targets, other=-1)
        place_K = local_K - first_entry
        here_K = (target_K < targets) & (place_K >= 0) & (place_K < width)
        product_K = tl.load(product_W + place_K, mask=here_K, other=0.0)
        logits_K = _bounded(product_K, gain, CAPPED) * cap
        tl.store(sums_MN + (2 + target_K) * tokens + token, logits_K, mask=here_K)


@triton.jit(do_not_specialize=["first_row", "first_entry"])
def to_gradient_kernel(
    product_RW,
    normaliser_N,
    local_NK,
    grad_logprobs_NK,
    entropy_N,
    grad_entropy_N,
    first_row,
    first_entry,
    width,
    targets,
    factor,
    gain,
    cap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    TARGETS: tl.constexpr,
):
    """Replaces one row of products by the gradient with respect to them, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    token = first_row + row
    product_W = product_RW + row * width
    local_K = local_NK + token * targets
    grad_K = grad_logprobs_NK + token * targets
    of_targets = 0.0
    for first in range(0, targets, TARGETS):
        target_K = first + tl.arange(0, TARGETS)
        of_targets += tl.sum(tl.load(grad_K + target_K, mask=target_K < targets, other=0.0), 0)
    of_targets *= factor
    normaliser = tl.load(normaliser_N + token)
    if ENTROPY:
        entropy, of_entropy = tl.load(entropy_N + token), tl.load(grad_entropy_N + token) * factor
    for first in range(0, width, BLOCK):
        place_B = first + tl.arange(0, BLOCK)
        product_B = tl.load(product_W + place_B, mask=place_B < width, other=0.0)
        bounded_B = _bounded(product_B, gain, CAPPED)
        logprob_B = bounded_B * cap - normaliser
        if ENTROPY:
            grad_B = tl.exp(logprob_B) * -((logprob_B + entropy) * of_entropy + of_targets)
        else:
            grad_B = tl.exp(logprob_B) * -of_targets
        for target in range(0, targets):  # one after another, since they can repeat
            place = tl.load(local_K + target) - first_entry
            if (place >= first) & (place < first + BLOCK):
                of_target = tl.load(grad_K + target) * factor
                grad_B += tl.where(place_B == place, of_target, 0.0)
        if CAPPED:
            grad_B *= 1.0 - bounded_B * bounded_B
        rounded_B = grad_B.to(product_RW.dtype.element_ty)
        tl.store(product_W + place_B, rounded_B, mask=place_B < width)


@triton.jit
def _bounded(product, gain, CAPPED: tl.constexpr):
    """What the factor `cap` makes a logit of, fp32: the scaled product, or its tanh."""
    x = product.to(tl.float32) * gain
    if CAPPED:
        # Within a few units in the last place: near 0, where the quotient cancels, by its series.
        square = x * x
        terms = -17.0 / 315.0 + square * (62.0 / 2835.0 - square * (1382.0 / 155925.0))
        near = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * terms))
        power = tl.exp(-2.0 * tl.abs(x))
        far = (1.0 - power) / (1.0 + power)
        x = tl.where(tl.abs(x) < 0.35, near, tl.where(x < 0.0, -far, far))
    return x
