"""Rows of experts that HF keeps stacked in one tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from megatron_policy.converters.architecture import Architecture, LayerPart, Moe

from .blocks import Block, Row, Shape, even, nth
from .kinds import ALL, Columns, GateUp, Ignore, RowBase, Whole

STACKED = "stacked"
"""The condition of rows of stacks where a family's checkpoints need not have them."""
INPUTS_FIRST = "inputs_first"
"""That of rows of stacks with inputs before outputs, where a family's checkpoints need not have
them so; those of the other order have "!" before it.
"""


@dataclass(frozen=True)
class StackedGateUp(RowBase):
    """Input projection of one expert's gated MLP; HF stacks all, gate and up rows interleaved.

    HF keeps weights transposed: [experts, hidden, 2 x ffn]; biases are [experts, 2 x ffn].
    """

    tail: tuple[str, ...]
    """Dimensions after the rows: ("hidden_size",) of a weight, () of a bias."""
    expert: int = 0
    part: type[LayerPart] | None = field(default=Moe, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        experts, rows = self.measure(arch, ("experts", "ffn_hidden_size"))
        return ((experts, *self.measure(arch, self.tail), 2 * rows),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        (rows,) = self.measure(arch, ("ffn_hidden_size",))
        return (2 * even(rows, size, self), *self.measure(arch, self.tail))

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
    part: type[LayerPart] | None = field(default=Moe, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        experts, out, inner = self.measure(arch, ("experts", *self.dims))
        return ((experts, inner, out),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        out, inner = self.measure(arch, self.dims)
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
    part: type[LayerPart] | None = field(default=Moe, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        return (self.measure(arch, ("experts", *self.dims)),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        return self.measure(arch, self.dims)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        (stack,), local = self.hf_shapes(arch), self.measure(arch, self.dims)
        return (Block(0, stack, (nth(self.expert, 1),), (1, *local), ALL),)


@dataclass(frozen=True)
class StackedGateAboveUp(RowBase):
    """Input projection of one expert's gated MLP; HF stacks all, each gate above its up projection:
    [experts, 2 x ffn, hidden], or transposed, [experts, hidden, 2 x ffn].
    """

    tail: tuple[str, ...]
    """Dimensions after the rows."""
    expert: int = 0
    transposed: bool = field(default=False, kw_only=True)
    part: type[LayerPart] | None = field(default=Moe, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        experts, rows = self.measure(arch, ("experts", "ffn_hidden_size"))
        tail = self.measure(arch, self.tail)
        return ((experts, *tail, 2 * rows) if self.transposed else (experts, 2 * rows, *tail),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        (rows,) = self.measure(arch, ("ffn_hidden_size",))
        return (2 * even(rows, size, self), *self.measure(arch, self.tail))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        (stack,), local = self.hf_shapes(arch), self.local_shape(arch, size)
        (rows,) = self.measure(arch, ("ffn_hidden_size",))
        mine = local[0] // 2
        before = ALL * (len(self.tail) if self.transposed else 0)

        def block(half: int) -> Block:
            first = half * rows + rank * mine
            index = (nth(self.expert, 1), *before, slice(first, first + mine))
            turned = self.transposed and bool(self.tail)
            return Block(0, stack, index, (1, *local), (*ALL, nth(half, mine)), turned)

        return block(0), block(1)


@dataclass(frozen=True)
class StackedInputs(RowBase):
    """Output projection of one expert's gated MLP, of which ranks share the inputs; HF stacks all:
    [experts, out, ffn], or transposed, [experts, ffn, out].
    """

    dims: tuple[str, str]
    """Output and input dimensions."""
    expert: int = 0
    transposed: bool = field(default=False, kw_only=True)
    part: type[LayerPart] | None = field(default=Moe, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        experts, out, inner = self.measure(arch, ("experts", *self.dims))
        return ((experts, inner, out) if self.transposed else (experts, out, inner),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        out, inner = self.measure(arch, self.dims)
        return (out, even(inner, size, self))

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        (stack,), local = self.hf_shapes(arch), self.local_shape(arch, size)
        before = () if self.transposed else ALL
        index = (nth(self.expert, 1), *before, nth(rank, local[1]))
        return (Block(0, stack, index, (1, *local), ALL, self.transposed),)


@dataclass(frozen=True)
class StackedAdapterA(RowBase):
    """A of the low-rank adapter on one expert of a stack; PEFT has those of all experts one below
    another: [experts x rank, inputs].
    """

    rank: int
    inputs: str
    split: bool
    """Whether ranks share the inputs."""
    expert: int = 0
    part: type[LayerPart] | None = field(default=Moe, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        experts, inputs = self.measure(arch, ("experts", self.inputs))
        return ((experts * self.rank, inputs),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        (inputs,) = self.measure(arch, (self.inputs,))
        return (self.rank, even(inputs, size, self) if self.split else inputs)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        (stack,), local = self.hf_shapes(arch), self.local_shape(arch, size)
        columns = (nth(rank, local[1]),) if self.split else ALL
        return (Block(0, stack, (nth(self.expert, self.rank), *columns), local, ALL),)


@dataclass(frozen=True)
class StackedAdapterB(RowBase):
    """B of the low-rank adapter on one expert of a stack; PEFT has those of all experts in turns:
    [outputs, rank x experts], a column of each expert after another.
    """

    of: StackedGateUp | StackedRows | StackedGateAboveUp | StackedInputs | GateUp | Columns | Whole
    """The row of the weight that is adapted, or of its adapter's B alone, whose outputs these are.
    """
    rank: int
    expert: int = 0
    part: type[LayerPart] | None = field(default=Moe, kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        (experts,) = self.measure(arch, ("experts",))
        return ((self.of.local_shape(arch, 1)[0], self.rank * experts),)

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        return (self.of.local_shape(arch, size)[0], self.rank)

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        outputs, columns = self.hf_shapes(arch)[0]
        view = (outputs, self.rank, columns // self.rank)
        local = (*self.local_shape(arch, size), 1)

        def block(rows: slice, own: slice) -> Block:
            return Block(0, view, (rows, *ALL, nth(self.expert, 1)), local, (own,))

        own, half = local[0], local[0] // 2
        shards = outputs // own
        if isinstance(self.of, StackedGateUp):
            ends = own * rank, own * (rank + 1)
            return tuple(block(slice(ends[0] + n, ends[1], 2), nth(n, half)) for n in range(2))
        if isinstance(self.of, StackedGateAboveUp | GateUp):
            return tuple(block(nth(n * shards + rank, half), nth(n, half)) for n in range(2))
        return (block(nth(rank % shards, own), nth(0, own)),)


_Untransposed = StackedGateAboveUp | StackedInputs
_Adapters = StackedAdapterA | StackedAdapterB
Stacked = StackedGateUp | StackedRows | StackedWhole | _Untransposed | _Adapters
"""Rows whose HF tensor holds all experts of a layer; `expert` says which one the row takes."""


def has_order(row: Row) -> bool:
    """Whether checkpoints can have what it names in either order of dimensions."""
    return row.when.removeprefix("!") == INPUTS_FIRST


def tell_order(row: Row) -> str:
    """What decides about that order if shapes do not, after a comma."""
    said = ", in the order that transformers_version of config.json says"
    return said if has_order(row) else ""


def order_experts(
    rows: Iterable[Row | Ignore], architecture: Architecture, named: Collection[str]
) -> Architecture:
    """The architecture with stacks of experts in the order of dimensions that their shapes have, if
    `named` maps to these and they fit one order alone.
    """
    shapes = named if isinstance(named, Mapping) else {}
    stacks = [row for row in rows if not isinstance(row, Ignore) and has_order(row)]
    if not shapes or not stacks:
        return architecture

    def fits(order: Architecture) -> bool:
        return all(
            shapes.get(name.replace("{layer}", str(layer))) in (None, shape)
            for row in stacks
            for layer in order.expert_layers
            if order.holds(row.when, Moe, layer)
            for name, shape in zip(row.hf, row.hf_shapes(order), strict=True)
        )

    orders = (architecture.change_experts(inputs_first=first) for first in (False, True))
    fitting = [each for each in orders if fits(each)]
    return fitting[0] if len(fitting) == 1 else architecture
