"""The layout algebra: maps elements of HF tensors to elements of a rank's Megatron shard.

A row names both sides and describes their correspondence once, as blocks; loading, exporting,
packing and sharding (blocks.py) all follow those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron_policy.converters.architecture import Architecture, padded_vocab

from .blocks import (
    Block,
    Role,
    Row,
    Shape,
    blocks_of,
    even,
    fill_parts,
    fill_shard,
    nth,
    pack,
    shard,
    unpack,
    unshard,
)

__all__ = [
    "Block",
    "Columns",
    "GateUp",
    "Ignore",
    "Qkv",
    "Role",
    "Row",
    "Rows",
    "Shape",
    "Tied",
    "Vocab",
    "Whole",
    "blocks_of",
    "fill_parts",
    "fill_shard",
    "pack",
    "shard",
    "unpack",
    "unshard",
]

ALL = (slice(None),)


@dataclass(frozen=True)
class Whole:
    """Replicated: every tensor-parallel rank holds the whole tensor."""

    megatron: str
    hf: tuple[str]
    dims: tuple[str, ...]
    when: str = ""
    role: Role = Role.MATRIX
    keeps_dtype: bool = False
    """The parameter keeps its own dtype, whatever the model's precision; nothing casts it."""
    owns: ClassVar[bool] = True
    shard_dim: ClassVar[int | None] = None
    stripes: ClassVar[int] = 1

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (arch.shape(self.dims),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        return arch.shape(self.dims)

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        return 0

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        shape = arch.shape(self.dims)
        return (Block(0, shape, ALL, shape, ALL),)


@dataclass(frozen=True)
class Columns:
    """ColumnParallelLinear: the output dimension (first) is split over the ranks."""

    megatron: str
    hf: tuple[str]
    dims: tuple[str, ...]
    when: str = ""
    role: Role = Role.MATRIX
    owns: ClassVar[bool] = True
    keeps_dtype: ClassVar[bool] = False
    shard_dim: ClassVar[int | None] = 0
    stripes: ClassVar[int] = 1

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (arch.shape(self.dims),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows, *tail = arch.shape(self.dims)
        return (even(rows, size, self), *tail)

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        return 0

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        local = self.local_shape(arch, size)
        return (Block(0, arch.shape(self.dims), (nth(rank, local[0]),), local, ALL),)


@dataclass(frozen=True)
class Rows:
    """RowParallelLinear: the input dimension (second) is split over the ranks."""

    megatron: str
    hf: tuple[str]
    dims: tuple[str, str]
    when: str = ""
    role: ClassVar[Role] = Role.MATRIX
    owns: ClassVar[bool] = True
    keeps_dtype: ClassVar[bool] = False
    shard_dim: ClassVar[int | None] = 1
    stripes: ClassVar[int] = 1

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (arch.shape(self.dims),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        out, inner = arch.shape(self.dims)
        return (out, even(inner, size, self))

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        return 0

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        local = self.local_shape(arch, size)
        return (Block(0, arch.shape(self.dims), (*ALL, nth(rank, local[1])), local, ALL),)


@dataclass(frozen=True)
class Qkv:
    """Fused attention input: for each group, the query heads, then the key and value heads."""

    megatron: str
    hf: tuple[str, str, str]
    tail: tuple[str, ...]
    """Dimensions after the rows: ("hidden_size",) of a weight, () of a bias."""
    when: str = ""
    role: Role = Role.MATRIX
    owns: ClassVar[bool] = True
    keeps_dtype: ClassVar[bool] = False
    shard_dim: ClassVar[int | None] = 0
    stripes: ClassVar[int] = 1

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        tail = arch.shape(self.tail)
        return ((arch.query_size, *tail), (arch.kv_size, *tail), (arch.kv_size, *tail))

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        return (even(arch.query_size + 2 * arch.kv_size, size, self), *arch.shape(self.tail))

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        return 0

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        if arch.num_query_groups % size:
            return tuple(self.cuts(arch, rank, size))
        groups, head, tail = arch.num_query_groups, arch.kv_channels, arch.shape(self.tail)
        mine = groups // size
        fused = (mine, arch.heads_per_group + 2, head, *tail)
        return tuple(
            Block(part, (groups, heads, head, *tail), (nth(rank, mine),), fused, (*ALL, at))
            for part, (heads, at) in enumerate(self._heads(arch))
        )

    def _heads(self, arch: Architecture) -> tuple[tuple[int, slice], ...]:
        """For q, k and v: heads per group, and their range among the heads of a fused group."""
        per = arch.heads_per_group
        return (per, slice(0, per)), (1, slice(per, per + 1)), (1, slice(per + 1, per + 2))

    def cuts(self, arch: Architecture, rank: int, size: int) -> Iterator[Block]:
        """The blocks as ranges of rows: more ranks than groups split them evenly, even inside a
        head.
        """
        head, local, shapes = arch.kv_channels, self.local_shape(arch, size), self.hf_shapes(arch)
        low, high = rank * local[0], (rank + 1) * local[0]
        for group in range(arch.num_query_groups):
            for part, (heads, at) in enumerate(self._heads(arch)):
                start = (group * (arch.heads_per_group + 2) + at.start) * head
                first, last = max(start, low), min(start + heads * head, high)
                if first < last:
                    move = group * heads * head - start
                    rows, place = slice(first + move, last + move), slice(first - low, last - low)
                    yield Block(part, shapes[part], (rows,), local, (place,))


@dataclass(frozen=True)
class GateUp:
    """Gated MLP input: each rank holds its rows of the gate, then its rows of the up projection."""

    megatron: str
    hf: tuple[str, str]
    dims: tuple[str, ...]
    when: str = ""
    role: Role = Role.MATRIX
    owns: ClassVar[bool] = True
    keeps_dtype: ClassVar[bool] = False
    shard_dim: ClassVar[int | None] = 0
    stripes: ClassVar[int] = 2

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (arch.shape(self.dims),) * 2

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows, *tail = arch.shape(self.dims)
        return (2 * even(rows, size, self), *tail)

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        return 0

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        shape, local = arch.shape(self.dims), self.local_shape(arch, size)
        mine = local[0] // 2
        return tuple(
            Block(part, shape, (nth(rank, mine),), local, (nth(part, mine),)) for part in (0, 1)
        )


@dataclass(frozen=True)
class Vocab:
    """Split over the vocabulary, padded with zero rows so that every rank holds the same number."""

    megatron: str
    hf: tuple[str]
    dims: tuple[str, ...]
    when: str = ""
    role: ClassVar[Role] = Role.MATRIX
    owns: ClassVar[bool] = True
    keeps_dtype: ClassVar[bool] = False
    shard_dim: ClassVar[int | None] = 0
    stripes: ClassVar[int] = 1

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (arch.shape(self.dims),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows, *tail = arch.shape(self.dims)
        return (padded_vocab(rows, size) // size, *tail)

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        local = self.local_shape(arch, size)[0]
        return min(local, max(0, (rank + 1) * local - arch.shape(self.dims)[0]))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        shape, local = arch.shape(self.dims), self.local_shape(arch, size)
        first, real = rank * local[0], local[0] - self.pad_rows(arch, rank, size)
        if not real:
            return ()
        return (Block(0, shape, (slice(first, first + real),), local, (slice(0, real),)),)


@dataclass(frozen=True)
class Tied:
    """A tied copy of another row's parameter, on the stage that needs it: filled, not exported."""

    megatron: str
    of: Vocab
    when: str = ""
    role: ClassVar[Role] = Role.MATRIX
    owns: ClassVar[bool] = False
    keeps_dtype: ClassVar[bool] = False
    shard_dim: ClassVar[int | None] = 0
    stripes: ClassVar[int] = 1

    @property
    def hf(self) -> tuple[str, ...]:
        return self.of.hf

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return self.of.hf_shapes(arch)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        return self.of.local_shape(arch, size)

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        return self.of.pad_rows(arch, rank, size)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        return self.of.blocks(arch, rank, size)


@dataclass(frozen=True)
class Ignore:
    """An HF tensor that can be present but feeds nothing, and why; if `equals` is set, it must
    equal it.
    """

    hf: str
    why: str
    when: str = ""
    equals: str = ""
