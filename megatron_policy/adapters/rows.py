"""Rows of adapters on some or all parts of a fused layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_policy.converters.architecture import Architecture, Attention, LayerPart
from megatron_policy.converters.rows.blocks import Block, Shape, even, nth
from megatron_policy.converters.rows.kinds import ALL, RowBase


@dataclass(frozen=True)
class Concatenated(RowBase):
    """Replicated; HF tensors of the same dimensions one below another."""

    dims: tuple[str | int, ...]

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (self.measure(arch, self.dims),) * len(self.hf)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        rows, *tail = self.measure(arch, self.dims)
        return (rows * len(self.hf), *tail)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        shape, local = self.measure(arch, self.dims), self.local_shape(arch, size)
        return tuple(
            Block(part, shape, ALL, local, (nth(part, shape[0]),)) for part in range(len(self.hf))
        )


@dataclass(frozen=True)
class QkvParts(RowBase):
    """Some parts of a fused attention input: for each group, the heads of each part."""

    parts: tuple[int, ...]
    tail: tuple[str | int, ...]
    part: type[LayerPart] | None = field(default=Attention, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        sizes = self.measure(arch, ("query_size", "kv_size", "kv_size"))
        return tuple((sizes[part], *self.measure(arch, self.tail)) for part in self.parts)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        groups, head, *tail = self.measure(arch, ("num_query_groups", "kv_channels", *self.tail))
        return (even(groups, size, self) * sum(self._heads(arch)) * head, *tail)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        groups, head, *tail = self.measure(arch, ("num_query_groups", "kv_channels", *self.tail))
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
        all_parts = self.measure(arch, ("heads_per_group", 1, 1))
        return tuple(all_parts[part] for part in self.parts)


@dataclass(frozen=True)
class GatedQkvParts(RowBase):
    """Some parts of a fused attention input with a gate: for each group the heads of each part,
    those of queries followed by their gates.
    """

    parts: tuple[int, ...]
    tail: tuple[str | int, ...]
    part: type[LayerPart] | None = field(default=Attention, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        sizes = self.measure(arch, ("gated_query_size", "kv_size", "kv_size"))
        return tuple((sizes[part], *self.measure(arch, self.tail)) for part in self.parts)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        (groups,) = self.measure(arch, ("num_query_groups",))
        rows = sum(rows for rows, *_ in self.hf_shapes(arch))
        return (even(groups, size, self) * (rows // groups), *self.measure(arch, self.tail))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        names = ("num_query_groups", "heads_per_group", "kv_channels")
        groups, per, head, *tail = self.measure(arch, (*names, *self.tail))
        mine, blocks, place = even(groups, size, self), list[Block](), 0
        fused = (mine, self.local_shape(arch, size)[0] // (mine * head), 1, head, *tail)
        for n, part in enumerate(self.parts):
            heads, kinds = (1, 1) if part else (per, 2)
            view = (groups, heads, kinds, head, *tail)
            for kind in range(kinds):
                taken = (nth(rank, mine), *ALL, nth(kind, 1))
                blocks.append(Block(n, view, taken, fused, (*ALL, slice(place, place + heads))))
                place += heads
        return tuple(blocks)
