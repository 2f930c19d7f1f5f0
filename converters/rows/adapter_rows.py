"""Rows of adapters on some or all parts of a fused layer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_policy.converters.architecture import Architecture

from .blocks import Block, Shape, even, nth
from .kinds import ALL, RowBase


@dataclass(frozen=True)
class Concatenated(RowBase):
    """Replicated; HF tensors of the same dimensions one below another."""

    dims: tuple[str | int, ...]

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (arch.shape(self.dims),) * len(self.hf)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows, *tail = arch.shape(self.dims)
        return (rows * len(self.hf), *tail)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        shape, local = arch.shape(self.dims), self.local_shape(arch, size)
        return tuple(
            Block(part, shape, ALL, local, (nth(part, shape[0]),)) for part in range(len(self.hf))
        )


@dataclass(frozen=True)
class QkvParts(RowBase):
    """Some parts of a fused attention input: for each group, the heads of each part."""

    parts: tuple[int, ...]
    tail: tuple[str | int, ...]

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        sizes = (arch.query_size, arch.kv_size, arch.kv_size)
        return tuple((sizes[part], *arch.shape(self.tail)) for part in self.parts)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        groups = even(arch.num_query_groups, size, self)
        return (groups * sum(self._heads(arch)) * arch.kv_channels, *arch.shape(self.tail))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        groups, head, tail = arch.num_query_groups, arch.kv_channels, arch.shape(self.tail)
        mine, heads = even(groups, size, self), self._heads(arch)
        fused = (mine, sum(heads), head, *tail)
        ends = [sum(heads[: n + 1]) for n in range(len(heads))]
        return tuple(
            Block(
                n,
                (groups, own, head, *tail),
                (nth(rank, mine),),
                fused,
                (*ALL, slice(end - own, end)),
            )
            for n, (own, end) in enumerate(zip(heads, ends, strict=True))
        )

    def _heads(self, arch: Architecture) -> tuple[int, ...]:
        all_parts = (arch.heads_per_group, 1, 1)
        return tuple(all_parts[part] for part in self.parts)
