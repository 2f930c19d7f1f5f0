"""The tiles of a language-model head's logits: their grid, their products in reused buffers, and
what the passes over them keep of each token.

Shapes: N tokens, V entries of this rank's slice of the vocabulary, D model, R rows and W entries of
a tile, K targets of a token, M running sums of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_policy.device import is_accelerated
from megatron_policy.lm_head.filters import Filters

# Below any logit, and yet finite: infinity minus infinity is NaN.
LOWEST = -1e30

# Elements of a tile on which elementwise work is done at once. A CPU passes over them several
# times, so they have to stay in its cache; a GPU wants few and large kernels.
ELEMENTWISE_CPU = 2**18
ELEMENTWISE_GPU = 2**28

# The same where filters are searched, which also talk to other ranks for every strip.
SEARCHED_CPU = 2**20
SEARCHED_GPU = 2**26

# Narrower products are inefficient: rather than fewer entries per tile, tokens are split.
LEAST_WIDTH = 256

# Matrix products on a GPU want rows that start at multiples of 16 bytes, and whole blocks.
WIDTH_MULTIPLE = 128


@dataclass(frozen=True)
class HeadShape:
    """How a head computes logits from a token's hidden state h and an entry's weights w:
    `softcap(scale * h.w) / temperature`.

    This rank's slice of the vocabulary starts at entry `vocab_start`. Its first `real` entries are
    in the vocabulary, the rest is padding with probability 0. `real` can be 0. Scores are those of
    what `filters` keep, None everything.
    """

    vocab_start: int
    real: int
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    filters: Filters | None = None


PADDING_LOGIT = -1e9
"""Of a padding entry of the vocabulary: its probability is exactly 0, and 0 * logit stays finite.
"""


def finish_whole_logits(products_V: torch.Tensor, head: HeadShape) -> torch.Tensor:
    """The logits `[..., V]` of products `h.w`, fp32, with those of padding entries. In place as far
    as gradients allow: only a softcap needs another matrix.
    """
    if head.scale != 1.0:
        products_V.mul_(head.scale)
    if head.softcap is not None:
        products_V = products_V.div_(head.softcap).tanh_() * head.softcap
    if head.temperature != 1.0:
        products_V.div_(head.temperature)
    if head.real < products_V.size(-1):
        padding_V = torch.arange(products_V.size(-1), device=products_V.device) >= head.real
        products_V.masked_fill_(padding_V, PADDING_LOGIT)
    return products_V


@dataclass(frozen=True)
class VocabTile:
    """A rectangle of tokens and entries."""

    rows: slice
    entries: slice


@dataclass(frozen=True)
class Tiling:
    """A grid of tiles of at most `height` x `width`; elementwise work takes `strip` rows of a tile
    at a time.

    Tiles are as high as possible: where one spans all tokens, the gradient of its weights is one
    matrix product, and every weight is read once.
    """

    tokens: int
    real: int
    height: int
    width: int
    strip: int

    def columns(self) -> Iterator[list[VocabTile]]:
        """All tiles, grouped by their entries."""
        for entries in _ranges(0, self.real, self.width):
            yield [VocabTile(rows, entries) for rows in self.rows()]

    def rows(self) -> Iterator[slice]:
        """The rows of each tile, whatever its entries."""
        return _ranges(0, self.tokens, self.height)

    def strip_rows(self) -> Iterator[slice]:
        """The rows of each strip, among all tokens, in the order of tiles."""
        for rows in self.rows():
            yield from _ranges(rows.start, rows.stop, self.strip)

    def strips(self, tile: VocabTile) -> Iterator[tuple[slice, slice]]:
        """The rows of each strip, among all tokens and among those of the tile."""
        for rows in _ranges(tile.rows.start, tile.rows.stop, self.strip):
            yield rows, slice(rows.start - tile.rows.start, rows.stop - tile.rows.start)


def tiling(tokens: int, vocab: int, real: int, chunk: int) -> Tiling:
    """Tiles of at most `chunk * vocab` elements."""
    budget = chunk * max(vocab, 1)
    width = max(1, min(real, max(budget // max(tokens, 1), min(LEAST_WIDTH, budget))))
    if WIDTH_MULTIPLE <= width < real:
        width -= width % WIDTH_MULTIPLE
    height = max(1, min(tokens, budget // width))
    elementwise = ELEMENTWISE_GPU if is_accelerated() else ELEMENTWISE_CPU
    return Tiling(tokens, real, height, width, max(1, min(height, elementwise // width)))


def row_tiling(tokens: int, vocab: int, real: int, chunk: int) -> Tiling:
    """Tiles of at most `chunk * vocab` elements that have all entries of the slice, so that filters
    see a token at once. Their rows and strips are the same on all ranks of equal `vocab`.
    """
    height = max(1, min(tokens, chunk))
    elements = SEARCHED_GPU if is_accelerated() else SEARCHED_CPU
    strip = max(1, min(height, elements // max(vocab, 1)))
    return Tiling(tokens, real, height, max(1, real), strip)


def _ranges(start: int, stop: int, step: int) -> Iterator[slice]:
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


@dataclass(frozen=True)
class MatrixBuffer:
    """Memory for one matrix at a time, of any shape that fits."""

    flat: torch.Tensor

    def view(self, rows: int, columns: int) -> torch.Tensor:
        return self.flat[: rows * columns].view(rows, columns)


def buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> MatrixBuffer:
    """A buffer for matrices of up to `rows * columns` elements."""
    return MatrixBuffer(torch.empty(rows * columns, dtype=dtype, device=device))


def calculation_dtype(weight_VD: torch.Tensor) -> torch.dtype:
    """The dtype of everything but matrix products: fp32, or wider if the weights are."""
    return torch.promote_types(weight_VD.dtype, torch.float32)


def multiply(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, tile: VocabTile, out: MatrixBuffer
) -> torch.Tensor:
    """`h.w` of a tile `[R, W]`, in the dtype of the weights, as in the model's head."""
    hidden_RD, weight_WD = hidden_ND[tile.rows], weight_VD[tile.entries]
    product_RW = out.view(hidden_RD.size(0), weight_WD.size(0))
    return torch.mm(hidden_RD, weight_WD.t(), out=product_RW)


@dataclass(frozen=True)
class Sums:
    """Running statistics of each token's logits l, updated in place: the maximum (`peak`), the sums
    of `exp(l - peak)` and of `exp(l - peak) * (l - peak)`, and each target's logit, 0 until it is
    seen: M = 2 + K sums. The second sum has no meaning unless the entropy is wanted.
    """

    peak_N: torch.Tensor
    sums_MN: torch.Tensor

    @classmethod
    def of_nothing(cls, local_NK: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Sums:
        tokens, targets = local_NK.shape
        peak_N = torch.full((tokens,), LOWEST, dtype=dtype, device=device)
        return cls(peak_N, torch.zeros(2 + targets, tokens, dtype=dtype, device=device))

    @property
    def total_N(self) -> torch.Tensor:
        return self.sums_MN[0]

    @property
    def moment_N(self) -> torch.Tensor:
        return self.sums_MN[1]

    @property
    def target_NK(self) -> torch.Tensor:
        return self.sums_MN[2:].t()

    def of(self, rows: slice) -> Sums:
        return Sums(self.peak_N[rows], self.sums_MN[:, rows])

    def raise_peak(self, peak_N: torch.Tensor) -> None:
        """Rescale the sums to a peak that is at least as large."""
        difference_N = self.peak_N - peak_N
        self.moment_N.addcmul_(difference_N, self.total_N)
        self.sums_MN[:2].mul_(difference_N.exp_())
        self.peak_N.copy_(peak_N)


@dataclass(frozen=True)
class Known:
    """What the forward pass has saved, and the loss's gradients with respect to its two results.

    `local_NK` are the targets relative to this rank's slice, outside it for those of other
    ranks. Without `grad_entropy_N` the loss does not depend on the entropy. All are contiguous.
    """

    normaliser_N: torch.Tensor
    local_NK: torch.Tensor
    grad_logprobs_NK: torch.Tensor
    entropy_N: torch.Tensor | None
    grad_entropy_N: torch.Tensor | None
