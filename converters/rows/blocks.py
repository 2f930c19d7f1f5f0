"""Moves a parameter between its HF tensors and a rank's shard, along the blocks of its row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megatron_policy.converters.architecture import Architecture, LayerPart
from megatron_policy.errors import ConversionError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

Ranges = tuple[tuple[int, int], ...]
"""For each rank, the first element of a flat parameter that it holds, and the one after the last.
"""

EXPERT = "{expert}"


@dataclass(frozen=True)
class Block:
    """`hf[part].view(hf_view)[hf_index]` holds the elements of
    `shard.view(shard_view)[shard_index]`.
    """

    part: int
    hf_view: Shape
    hf_index: tuple[slice, ...]
    shard_view: Shape
    shard_index: tuple[slice, ...]
    transposed: bool = False
    """The last two dimensions of the HF elements are swapped first."""


class Role(Enum):
    """What a parameter is to its module. Code that treats some of them differently, such as weight
    decay, uses this: the number of dimensions does not show it.
    """

    MATRIX = "matrix"
    """The weight of a linear layer, an embedding, a router or an expert."""
    BIAS = "bias"
    """Added to what a linear layer, a norm, a router or an expert computes."""
    NORM = "norm"
    """The weight of a norm, also where every head has its own."""
    SINK = "sink"
    """A logit that takes part in a head's softmax and stands for no token."""
    ACTIVATION = "activation"
    """A constant of an activation function."""
    CONVOLUTION = "convolution"
    """What the channels of a convolution multiply tokens by."""
    RECURRENCE = "recurrence"
    """A head's constant of a recurrence: how fast its state decays, or what passes by it."""


DECAYED = (Role.MATRIX, Role.CONVOLUTION)
"""Parameters to which weight decay applies."""


class Taken(Protocol):
    """A viewed HF tensor from which a block takes its elements."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """The elements as a tensor view."""


class Copying(ABC):
    """A viewed HF tensor that a copy makes: taking its elements would make another one."""

    @abstractmethod
    def copy_to(self, out: Tensor, index: tuple[slice, ...], /) -> None:
        """Copy the elements at `index` to `out`, of their shape."""


class Part(Protocol):
    """An HF tensor to read from: a tensor, or a stand-in that fetches only the elements taken."""

    def view(self, shape: Shape, /) -> Taken:
        """The same elements in another shape."""


class Within(NamedTuple):
    """The parameter of training checkpoints of which a row's is a part: its row, and for each HF
    tensor of the part its number there.
    """

    row: Row
    parts: tuple[int, ...]


class Row(Hashable, Protocol):
    """One Megatron parameter, its HF tensors, and where their elements lie in a shard."""

    @property
    def megatron(self) -> str:
        """Name template; {layer} and {expert} are global numbers."""

    @property
    def hf(self) -> tuple[str, ...]:
        """Name templates of the HF tensors, in the order of `parts`."""

    @property
    def part(self) -> type[LayerPart] | None:
        """The kind of part that has the parameter; None: every layer, or the model."""

    @property
    def when(self) -> str:
        """Condition on that part or on the model, see `Architecture.holds`."""

    @property
    def role(self) -> Role:
        """What the parameter is to its module."""

    @property
    def owns(self) -> bool:
        """False when the HF tensors belong to another row, which exports them."""

    @property
    def keeps_dtype(self) -> bool:
        """Whether the parameter is held in fp32 and handed over in its checkpoint's dtype."""

    @property
    def learnt(self) -> bool:
        """False of what is stored as parameters are but has no gradients."""

    @property
    def within(self) -> Within | None:
        """What training checkpoints have in place of the parameter; None: the parameter itself."""

    @property
    def ranges(self) -> Ranges | None:
        """Of a parameter that ranks hold as consecutive elements of the flat one, those of each;
        its shards are then no Cartesian products. None: as `blocks` says.
        """

    def hf_shapes(self, arch: Architecture) -> tuple[Shape, ...]:
        """Shapes of the HF tensors."""

    def local_shape(self, arch: Architecture, size: int) -> Shape:
        """Shape of one shard of `size`; ConversionError naming legal sizes if it is uneven."""

    def pad_rows(self, arch: Architecture, rank: int, size: int) -> int:
        """Rows at the end of this shard that no HF element fills: vocabulary padding, zeros."""

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        """Shard `rank` of `size` as disjoint blocks that cover all of it except its padding.

        A shard must be a Cartesian product: along each dimension, it holds a fixed set of indices
        of the unsharded parameter. Or it is one of the `ranges`.
        """


def of_expert(template: str) -> bool:
    """Whether the parameters of this name template are one for each expert: the experts' axes place
    them.
    """
    return EXPERT in template


@lru_cache(maxsize=4096)
def blocks_of(row: Row, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
    """`row.blocks`, computed once for all layers that share the row."""
    return row.blocks(arch, rank, size)


def fill_shard(
    row: Row, arch: Architecture, shard: Tensor, parts: Sequence[Part], rank: int, size: int
) -> None:
    """Copy this rank's elements of the HF tensors into `shard`, casting; padding becomes 0."""
    for block in blocks_of(row, arch, rank, size):
        viewed, region = parts[block.part].view(block.hf_view), _region(shard, block)
        if isinstance(viewed, Copying):
            viewed.copy_to(region.mT if block.transposed else region, block.hf_index)
            continue
        taken = viewed[block.hf_index]
        region.copy_(taken.mT if block.transposed else taken)
    if rows := row.pad_rows(arch, rank, size):
        shard.detach()[-rows:].zero_()


def fill_parts(
    row: Row, arch: Architecture, parts: Sequence[Tensor], shard: Tensor, rank: int, size: int
) -> None:
    """Copy the elements of `shard` into the HF tensors, casting; padding is dropped."""
    for block in blocks_of(row, arch, rank, size):
        taken = parts[block.part].view(block.hf_view)[block.hf_index]
        (taken.mT if block.transposed else taken).copy_(_region(shard, block))


def shard(row: Row, arch: Architecture, whole: Tensor, rank: int, size: int) -> Tensor:
    """Shard `rank` of `size` of the unsharded parameter."""
    out = whole.new_empty(row.local_shape(arch, size))
    fill_shard(row, arch, out, unpack(row, arch, whole), rank, size)
    return out


def unshard(row: Row, arch: Architecture, shards: Sequence[Tensor]) -> Tensor:
    """The unsharded parameter from all its shards, in rank order."""
    parts = [shards[0].new_empty(shape) for shape in row.hf_shapes(arch)]
    for rank, piece in enumerate(shards):
        fill_parts(row, arch, parts, piece, rank, len(shards))
    return pack(row, arch, parts)


def pack(row: Row, arch: Architecture, parts: Sequence[Tensor]) -> Tensor:
    """The unsharded parameter (as a single rank would hold it) from its HF tensors."""
    whole = parts[0].new_empty(row.local_shape(arch, 1))
    fill_shard(row, arch, whole, parts, 0, 1)
    return whole


def unpack(row: Row, arch: Architecture, whole: Tensor) -> list[Tensor]:
    """The HF tensors from the unsharded parameter; inverse of `pack`."""
    parts = [whole.new_empty(shape) for shape in row.hf_shapes(arch)]
    fill_parts(row, arch, parts, whole, 0, 1)
    return parts


def _region(shard: Tensor, block: Block) -> Tensor:
    """A view of the block's elements in a shard, detached so that parameters can be written to."""
    return shard.detach().view(block.shard_view)[block.shard_index]


def nth(index: int, length: int) -> slice:
    """Section `index` of those with `length` elements."""
    return slice(index * length, (index + 1) * length)


def even(total: int, size: int, row: Row) -> int:
    """A rank's share of `total`; ConversionError naming the legal sizes if it is uneven."""
    if total % size:
        legal = [n for n in range(1, min(total, 128) + 1) if total % n == 0]
        raise ConversionError(
            f"{row.megatron}: {total} cannot be split over {size} tensor-parallel ranks; "
            f"choose one of {legal}"
        )
    return total // size
