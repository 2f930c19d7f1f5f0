"""The kinds of rows: each names both sides and describes their correspondence once, as blocks.
Loading, exporting, packing and sharding (`blocks.py`) all follow those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from megatron_policy.converters.architecture import (
    Architecture,
    Attention,
    LayerPart,
    VocabShard,
    vocab_shard,
)

from .blocks import Block, Ranges, Role, Row, Shape, Within, even, nth

ALL = (slice(None),)


@dataclass(frozen=True)
class RowBase(ABC):
    """What rows have in common. A row is a frozen dataclass of it that adds `blocks` and shapes."""

    megatron: str
    hf: tuple[str, ...]
    part: type[LayerPart] | None = field(default=None, kw_only=True)
    """The kind of part that has the parameter, of which conditions and dimensions are attributes;
    None: every layer, or the model.
    """
    when: str = field(default="", kw_only=True)
    role: Role = field(default=Role.MATRIX, kw_only=True)
    keeps_dtype: bool = field(default=False, kw_only=True)
    """Engines hold the parameter in fp32, whatever the model's precision, and hand it over in the
    dtype of the checkpoint, whatever dtype is asked for.
    """
    learnt: bool = field(default=True, kw_only=True)
    """False of what is stored as parameters are but has no gradients: constants, and biases that
    move by a rule of their own.
    """
    owns: ClassVar[bool] = True

    @property
    def within(self) -> Within | None:
        return None

    @property
    def ranges(self) -> Ranges | None:
        return None

    def measure(self, arch: Architecture, dims: tuple[str | int, ...]) -> Shape:
        """The sizes of these dimensions."""
        return arch.shape(dims, self.part)

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        return 0

    @abstractmethod
    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        """See `Row`."""

    @abstractmethod
    def local_shape(self, arch: Architecture, size: int) -> Shape:
        """See `Row`."""

    @abstractmethod
    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        """See `Row`."""


def assign_part(part: type[LayerPart], *rows: RowBase) -> tuple[RowBase, ...]:
    """The same rows, of parameters that parts of this kind have."""
    return tuple(replace(row, part=part) for row in rows)


@dataclass(frozen=True)
class OneTensor(RowBase):
    """A row with one HF tensor of the dimensions `dims`: names or numbers."""

    dims: tuple[str | int, ...]

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (self.measure(arch, self.dims),)


@dataclass(frozen=True)
class Whole(OneTensor):
    """Replicated: every tensor-parallel rank holds the whole tensor."""

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        return self.measure(arch, self.dims)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        shape = self.measure(arch, self.dims)
        return (Block(0, shape, ALL, shape, ALL),)


@dataclass(frozen=True)
class Reshaped(Whole):
    """Replicated; the HF tensor holds the same elements in the dimensions `hf_dims`."""

    hf_dims: tuple[str | int, ...] = field(kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (self.measure(arch, self.hf_dims),)


@dataclass(frozen=True)
class Halves(Whole):
    """Replicated; the HF tensor has the halves of its second dimension in the other order."""

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        out, inner = self.measure(arch, self.dims)
        view = (out, 2, inner // 2)
        return tuple(
            Block(0, view, (*ALL, nth(half, 1)), view, (*ALL, nth(1 - half, 1))) for half in (0, 1)
        )


@dataclass(frozen=True)
class TowerQkv(Whole):
    """Replicated queries, keys or values of a tower; the HF tensor has all three, one below
    another. It is in the rows of all of them, side by side.
    """

    number: int = field(kw_only=True)
    """Which of the three."""
    heads: int = field(kw_only=True)
    """Into how many heads the rows fall where those that turn together are neighbours in the HF
    tensor, and half a head apart in the parameter; 0: rows are in the same order.
    """

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        rows, *tail = self.measure(arch, self.dims)
        return ((3 * rows, *tail),)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        rows, *tail = self.measure(arch, self.dims)
        own = nth(self.number, self.heads or 1)
        head = rows // (self.heads or 1)
        hf, shard = (3 * (self.heads or 1), head, *tail), (self.heads or 1, head, *tail)
        if not self.heads:
            return (Block(0, hf, (own,), shard, ALL),)
        return tuple(
            Block(0, hf, (own, slice(n, None, 2)), shard, (*ALL, nth(n, head // 2)))
            for n in range(2)
        )


@dataclass(frozen=True)
class Columns(OneTensor):
    """ColumnParallelLinear: the output dimension (first) is split over the ranks."""

    hf_dims: tuple[str | int, ...] = field(default=(), kw_only=True)
    """Of the HF tensor, which has the same elements in the same order; (): as `dims`."""

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (self.measure(arch, self.hf_dims or self.dims),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows, *tail = self.measure(arch, self.dims)
        return (even(rows, size, self), *tail)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        local = self.local_shape(arch, size)
        return (Block(0, self.measure(arch, self.dims), (nth(rank, local[0]),), local, ALL),)


@dataclass(frozen=True)
class Rows(OneTensor):
    """RowParallelLinear: the input dimension (second) is split over the ranks."""

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        out, inner = self.measure(arch, self.dims)
        return (out, even(inner, size, self))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        local = self.local_shape(arch, size)
        return (Block(0, self.measure(arch, self.dims), (*ALL, nth(rank, local[1])), local, ALL),)


@dataclass(frozen=True)
class Qkv(RowBase):
    """Fused attention input: for each group, the query heads, then the key and value heads."""

    tail: tuple[str | int, ...]
    """Dimensions after the rows: ("hidden_size",) of a weight, () of a bias."""
    part: type[LayerPart] | None = field(default=Attention, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        rows = self.measure(arch, ("query_size", "kv_size", "kv_size"))
        return tuple((size, *self.measure(arch, self.tail)) for size in rows)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows = sum(rows for rows, *_ in self.hf_shapes(arch))
        return (even(rows, size, self), *self.measure(arch, self.tail))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        names = ("num_query_groups", "heads_per_group", "kv_channels")
        groups, per, head, *tail = self.measure(arch, (*names, *self.tail))
        if groups % size:
            return tuple(self.cuts(arch, rank, size))
        mine = groups // size
        fused = (mine, per + 2, head, *tail)
        return tuple(
            Block(part, (groups, heads, head, *tail), (nth(rank, mine),), fused, (*ALL, at))
            for part, (heads, at) in enumerate(
                ((per, slice(0, per)), (1, slice(per, per + 1)), (1, slice(per + 1, per + 2)))
            )
        )

    def cuts(self, arch: Architecture, rank: int, size: int) -> Iterator[Block]:
        """The blocks as ranges of rows: more ranks than groups split them evenly, even inside a
        head. The ranks hold consecutive runs of the rows of the whole parameter.
        """
        local, shapes = self.local_shape(arch, size), self.hf_shapes(arch)
        low, high = rank * local[0], (rank + 1) * local[0]
        whole = self.blocks(arch, 0, 1)
        for group in range(whole[0].hf_view[0]):
            for block in whole:
                (_, heads, head, *_), (_, fused, *_) = block.hf_view, block.shard_view
                start = (group * fused + block.shard_index[1].start) * head
                first, last = max(start, low), min(start + heads * head, high)
                if first < last:
                    move = group * heads * head - start
                    rows, place = slice(first + move, last + move), slice(first - low, last - low)
                    yield Block(block.part, shapes[block.part], (rows,), local, (place,))


@dataclass(frozen=True)
class GateUp(RowBase):
    """Gated MLP input: each rank holds its rows of the gate, then its rows of the up projection."""

    dims: tuple[str | int, ...]

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (self.measure(arch, self.dims),) * 2

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows, *tail = self.measure(arch, self.dims)
        return (2 * even(rows, size, self), *tail)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        shape, local = self.measure(arch, self.dims), self.local_shape(arch, size)
        mine = local[0] // 2
        return tuple(
            Block(part, shape, (nth(rank, mine),), local, (nth(part, mine),)) for part in (0, 1)
        )


@dataclass(frozen=True)
class Vocab(OneTensor):
    """Split over the vocabulary, padded with zero rows so that every rank holds the same number."""

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        _, *tail = self.measure(arch, self.dims)
        return (self._shard(arch, 0, size).rows, *tail)

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        shard = self._shard(arch, rank, size)
        return shard.rows - shard.real

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        first, real, _ = self._shard(arch, rank, size)
        if not real:
            return ()
        shape, local = self.measure(arch, self.dims), self.local_shape(arch, size)
        return (Block(0, shape, (slice(first, first + real),), local, (slice(0, real),)),)

    def _shard(self, arch: Architecture, rank: int, size: int) -> VocabShard:
        return vocab_shard(self.measure(arch, self.dims)[0], rank, size)


class ForwardingRow:
    """Forwards to the row `of`: the same parameter from other HF tensors, or a copy of it."""

    of: Row

    @property
    def part(self) -> type[LayerPart] | None:
        return self.of.part

    @property
    def role(self) -> Role:
        return self.of.role

    @property
    def keeps_dtype(self) -> bool:
        return self.of.keeps_dtype

    @property
    def learnt(self) -> bool:
        return self.of.learnt

    @property
    def within(self) -> Within | None:
        return self.of.within

    @property
    def ranges(self) -> Ranges | None:
        return self.of.ranges

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        return self.of.local_shape(arch, size)

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        return self.of.pad_rows(arch, rank, size)


@dataclass(frozen=True)
class Tied(ForwardingRow):
    """A tied copy of another row's parameter, on the stage that needs it: filled, not exported."""

    megatron: str
    of: Vocab
    when: str = ""
    owns: ClassVar[bool] = False

    @property
    def hf(self) -> tuple[str, ...]:
        return self.of.hf

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return self.of.hf_shapes(arch)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        return self.of.blocks(arch, rank, size)


@dataclass(frozen=True)
class Joined(ForwardingRow):
    """Another row's Megatron parameter, with its HF tensors joined along their rows."""

    hf: tuple[str]
    of: Qkv | GateUp
    """The names of the parts in `of.hf` are not used."""
    owns: ClassVar[bool] = True

    @property
    def megatron(self) -> str:
        return self.of.megatron

    @property
    def when(self) -> str:
        return self.of.when

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        shapes = self.of.hf_shapes(arch)
        return ((sum(rows for rows, *_ in shapes), *shapes[0][1:]),)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        local = self.local_shape(arch, size)
        parts, (whole,) = self.of.hf_shapes(arch), self.hf_shapes(arch)
        starts = [sum(rows for rows, *_ in parts[:part]) for part in range(len(parts))]
        # Views by group do not fit the joined tensor, ranges of rows do.
        cut, blocks = self.of.cuts if isinstance(self.of, Qkv) else self.of.blocks, []
        for block in cut(arch, rank, size):
            rows, start = block.hf_index[0], starts[block.part]
            index = (slice(rows.start + start, rows.stop + start),)
            blocks.append(replace(block, part=0, hf_view=whole, hf_index=index, shard_view=local))
        return tuple(blocks)


@dataclass(frozen=True)
class Ignore:
    """An HF tensor that can be present but feeds nothing, and why; if `equals` is set, it must
    equal it. One that is `carried` belongs to the model all the same. Exports and refits repeat
    what it equals; otherwise an export to a Hugging Face directory copies its bytes from the
    checkpoint that the policy was read from.
    """

    hf: str
    """Its name, or with a star at the end what the names of many begin with."""
    why: str
    when: str = ""
    equals: str = ""
    carried: bool = False
