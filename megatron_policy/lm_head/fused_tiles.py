"""Computes the logits of a language-model head tile by tile, in reused buffers.

Shapes: N tokens, V entries of this rank's slice of the vocabulary, D model, R rows and W entries of
a tile, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_policy.device import is_accelerated

# Elements of a tile on which elementwise work is done at once. A CPU passes over them several
# times, so they have to stay in its cache; a GPU wants few and large kernels.
ELEMENTWISE_CPU = 2**18
ELEMENTWISE_GPU = 2**28

# Narrower products are inefficient: rather than fewer entries per tile, tokens are split.
LEAST_WIDTH = 256

# Matrix products on a GPU want rows that start at multiples of 16 bytes, and whole blocks.
WIDTH_MULTIPLE = 128


@dataclass(frozen=True)
class HeadShape:
    """How a head computes logits from a token's hidden state h and an entry's weights w:
    `softcap(scale * h.w) / temperature`.

    This rank's slice of the vocabulary starts at entry `vocab_start`. Its first `real` entries are
    in the vocabulary, the rest is padding with probability 0. `real` can be 0.
    """

    vocab_start: int
    real: int
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


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
            yield [VocabTile(rows, entries) for rows in _ranges(0, self.tokens, self.height)]

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


def finish_logits(product_RW: torch.Tensor, head: HeadShape, out: MatrixBuffer) -> torch.Tensor:
    """The logits `[R, W]` of products `h.w`."""
    logits_RW = out.view(*product_RW.shape).copy_(product_RW)
    if head.softcap is not None:
        logits_RW.mul_(head.scale / head.softcap).tanh_()
        return logits_RW.mul_(head.softcap / head.temperature)
    factor = head.scale / head.temperature
    return logits_RW if factor == 1.0 else logits_RW.mul_(factor)


def place_of_targets(local_RK: torch.Tensor, tile: VocabTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's index among the entries of a tile, int64 `[R, K]`, and whether it is there; the
    index of a target outside the tile has no meaning.
    """
    here_RK = (local_RK >= tile.entries.start) & (local_RK < tile.entries.stop)
    last = tile.entries.stop - tile.entries.start - 1
    return (local_RK - tile.entries.start).clamp(0, last), here_RK
