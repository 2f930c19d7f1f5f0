"""Rows whose HF tensors are stacked along their rows in a single HF tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_policy.converters.architecture import Architecture

from .blocks import Block, Shape
from .kinds import GateUp, OfAnother, Qkv


@dataclass(frozen=True)
class Joined(OfAnother):
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
        cut = self.of.cuts if isinstance(self.of, Qkv) else self.of.blocks
        # Views by group do not fit the joined tensor, ranges of rows do.
        return tuple(
            replace(
                block,
                part=0,
                hf_view=whole,
                hf_index=(_later(block.hf_index[0], starts[block.part]),),
                shard_view=local,
            )
            for block in cut(arch, rank, size)
        )


def _later(rows: slice, start: int) -> slice:
    return slice(rows.start + start, rows.stop + start)
