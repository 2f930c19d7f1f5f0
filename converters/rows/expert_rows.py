"""Rows of experts that HF keeps stacked in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_policy.converters.architecture import Architecture

from .blocks import Block, Shape, even, nth
from .kinds import ALL, RowBase


@dataclass(frozen=True)
class StackedGateUp(RowBase):
    """Input projection of one expert's gated MLP; HF stacks all, gate and up rows interleaved.

    HF keeps weights transposed: [experts, hidden, 2 x ffn]; biases are [experts, 2 x ffn].
    """

    tail: tuple[str, ...]
    """Dimensions after the rows: ("hidden_size",) of a weight, () of a bias."""
    expert: int = 0

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        experts, rows = arch.shape(("moe.experts", "moe.ffn_hidden_size"))
        return ((experts, *arch.shape(self.tail), 2 * rows),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        (rows,) = arch.shape(("moe.ffn_hidden_size",))
        return (2 * even(rows, size, self), *arch.shape(self.tail))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        (stack,), local = self.hf_shapes(arch), self.local_shape(arch, size)
        mine = local[0] // 2
        between = ALL * len(self.tail)

        def block(part: int) -> Block:
            rows = slice(2 * mine * rank + part, 2 * mine * (rank + 1), 2)
            index = (nth(self.expert, 1), *between, rows)
            return Block(0, stack, index, (1, *local), (*ALL, nth(part, mine)), bool(self.tail))

        return block(0), block(1)


@dataclass(frozen=True)
class StackedRows(RowBase):
    """Output projection of one expert's gated MLP; HF stacks all: [experts, ffn, out],
    transposed.
    """

    dims: tuple[str, str]
    """Output and input dimensions."""
    expert: int = 0

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        experts, out, inner = arch.shape(("moe.experts", *self.dims))
        return ((experts, inner, out),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        out, inner = arch.shape(self.dims)
        return (out, even(inner, size, self))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        (stack,), local = self.hf_shapes(arch), self.local_shape(arch, size)
        index = (nth(self.expert, 1), nth(rank, local[1]))
        return (Block(0, stack, index, (1, *local), ALL, transposed=True),)


@dataclass(frozen=True)
class StackedWhole(RowBase):
    """A replicated vector of one expert; HF stacks those of all experts: [experts, ...]."""

    dims: tuple[str, ...]
    expert: int = 0

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (arch.shape(("moe.experts", *self.dims)),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        return arch.shape(self.dims)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        (stack,), local = self.hf_shapes(arch), arch.shape(self.dims)
        return (Block(0, stack, (nth(self.expert, 1),), (1, *local), ALL),)


Stacked = StackedGateUp | StackedRows | StackedWhole
"""Rows whose HF tensor holds all experts of a layer; `expert` says which one the row takes."""
