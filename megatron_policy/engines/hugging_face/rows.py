"""Rows of parameters that ranks hold shares of as FSDP cuts them: consecutive indices along one
dimension, as many for each rank as `torch.chunk` gives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.blocks import Block, Shape, Within
from megatron_policy.converters.rows.kinds import RowBase


@dataclass(frozen=True)
class Share(RowBase):
    """HF tensors of the shapes `parts`, one after another along their first dimension, cut along
    `dim`; None: every rank holds all of it. Names are left to entries, so that layers share rows.
    """

    parts: tuple[Shape, ...] = field(kw_only=True)
    dim: int | None = field(default=0, kw_only=True)
    of: Within | None = field(default=None, kw_only=True)

    @property
    def within(self) -> Within | None:
        return self.of

    @property
    def whole(self) -> Shape:
        """The shape of the parameter that ranks hold between them."""
        if not self.parts[0]:
            return ()
        return (sum(rows for rows, *_ in self.parts), *self.parts[0][1:])

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return self.parts

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        """Of the first rank: the last ones can have less, or nothing."""
        return self._box(0, size)[1]

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        if not self.whole:
            return (Block(0, (1,), (slice(None),), (1,), (slice(None),)),)
        first, local = self._box(rank, size)
        if not math.prod(local):
            return ()
        found, start = [], 0
        for part, shape in enumerate(self.parts):
            low, high = max(start, first[0]), min(start + shape[0], first[0] + local[0])
            if low < high:
                others = tuple(
                    slice(at, at + length) for at, length in zip(first[1:], local[1:], strict=True)
                )
                rows, own = slice(low - start, high - start), slice(low - first[0], high - first[0])
                found.append(Block(part, shape, (rows, *others), local, (own,)))
            start += shape[0]
        return tuple(found)

    def _box(self, rank: int, size: int) -> tuple[Shape, Shape]:
        """The first index and the length of a rank's share in each dimension."""
        first, local = [0] * len(self.whole), list(self.whole)
        if self.dim is not None and local:
            each = -(-local[self.dim] // size)
            first[self.dim] = min(rank * each, local[self.dim])
            local[self.dim] = min(each, local[self.dim] - first[self.dim])
        return tuple(first), tuple(local)
