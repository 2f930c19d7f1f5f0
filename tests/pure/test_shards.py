"""Which elements a shard holds, derived from blocks, against shards of numbered tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron_policy.checkpoint.local_shards import cut_slices
from megatron_policy.converters.architecture import Architecture, Attention, Mlp, Moe
from megatron_policy.converters.rows import (
    Block,
    Columns,
    GateUp,
    Joined,
    Qkv,
    Row,
    Rows,
    Shape,
    Vocab,
    Whole,
    shard,
)
from megatron_policy.converters.rows.expert_rows import StackedGateUp, StackedRows, StackedWhole
from megatron_policy.converters.rows.regions import Indices, Region
from megatron_policy.converters.rows.shards import is_split, spans, split_dimension, unpadded_shape
from megatron_policy.errors import ConversionError
from tests.pure.test_checkpoint_slices import EXPERTS, architecture, legal
from tests.pure.test_rows import ROWS, model

MLP = ("ffn_hidden_size", "hidden_size")


@pytest.mark.parametrize("row", [*ROWS, *EXPERTS], ids=lambda row: f"{type(row).__name__}")
def test_spans_are_where_the_indices_of_a_shard_are_in_the_whole(row: Row) -> None:
    for size, arch in legal(row):
        shape = row.local_shape(arch, 1)
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        real = unpadded_shape(row, arch)
        for rank in range(size):
            # Padding of a shard is 0, as is the first element, which only the first shard has.
            held = shard(row, arch, whole + 1, rank, size) - 1
            own = torch.unravel_index(torch.nonzero((held >= 0).flatten()).flatten(), held.shape)
            there = torch.unravel_index(held[own], whole.shape)
            for dim, along in enumerate(spans(row, arch, rank, size)):
                assert all(a.own + a.length <= b.own for a, b in pairwise(along))
                found = torch.full((held.shape[dim],), -1)
                for span in along:
                    found[span.own : span.own + span.length] = torch.arange(
                        span.whole, span.whole + span.length
                    )
                unpadded = there[dim] < real[dim]
                assert torch.equal(found[own[dim]][unpadded], there[dim][unpadded])


@pytest.mark.parametrize(
    ("row", "dimension"),
    [
        (Whole("norm", ("n",), ("hidden_size",)), None),
        (Columns("up", ("u",), MLP, part=Mlp), 0),
        (Rows("down", ("d",), ("hidden_size", "ffn_hidden_size"), part=Mlp), 1),
        (GateUp("gate_up", ("g", "u"), MLP, part=Mlp), 0),
        (Qkv("qkv", ("q", "k", "v"), ("hidden_size",)), 0),
        (Vocab("embedding", ("e",), ("vocab_size", "hidden_size")), 0),
        (StackedGateUp("fc1", ("g",), ("hidden_size",), expert=2), 0),
        (StackedRows("fc2", ("d",), ("hidden_size", "ffn_hidden_size"), expert=1), 1),
        (StackedWhole("bias", ("b",), ("hidden_size",), expert=1), None),
    ],
)
def test_the_dimension_that_ranks_split(row: Row, dimension: int | None) -> None:
    arch = architecture(2)
    assert split_dimension(row, arch) == dimension
    assert is_split(row, arch, 2) == (dimension is not None)
    assert not is_split(row, arch, 1)


def test_a_vocabulary_that_fits_on_the_first_of_several_ranks_is_split_all_the_same() -> None:
    row, arch = Vocab("e", ("e",), ("vocab_size", "hidden_size")), model(vocab_size=100)
    assert is_split(row, arch, 4) and spans(row, arch, 3, 4) == ((), ())


def test_a_parameter_that_no_number_of_ranks_can_split_is_held_whole() -> None:
    row = Columns("one", ("o",), ("chosen",), part=Moe)
    assert split_dimension(row, architecture(1)) == 0
    single = Columns("one", ("o",), ("num_query_groups",), part=Attention)
    assert split_dimension(single, architecture(1)) is None


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConversionError, match="12 cannot be split over 5"):
        spans(Columns("up", ("u",), MLP, part=Mlp), model(), 0, 5)


def test_a_row_of_another_package_needs_no_more_than_its_blocks() -> None:
    """Halves of every head on either rank: no declared dimension could say so."""

    class Interleaved(Columns):
        def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
            whole, local = self.measure(arch, self.dims), self.local_shape(arch, size)
            hf: Shape = (local[0], size, *whole[1:])
            index = (slice(None), slice(rank, rank + 1))
            return (Block(0, hf, index, (local[0], 1, *local[1:]), (slice(None),)),)

    row, arch = Interleaved("up", ("u",), MLP, part=Mlp), model()
    rows, columns = spans(row, arch, 1, 2)
    assert [span.whole for span in rows] == [1, 3, 5, 7, 9, 11]
    assert all(span.length == 1 for span in rows) and columns == ((0, 0, 8),)
    assert split_dimension(row, arch) == 0


class TwoInputs(Rows):
    """The input is two tensors side by side, each split over the ranks: two runs of columns."""

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        whole, local = self.measure(arch, self.dims), self.local_shape(arch, size)
        half, mine = whole[1] // 2, local[1] // 2
        every = slice(None)
        return tuple(
            Block(
                0,
                whole,
                (every, slice(part * half + rank * mine, part * half + (rank + 1) * mine)),
                local,
                (every, slice(part * mine, (part + 1) * mine)),
            )
            for part in (0, 1)
        )


@pytest.mark.parametrize("ends", [(0, 48), (0, 5), (5, 20), (4, 4), (1, 47)])
def test_a_shard_with_two_runs_of_columns_is_cut_row_by_row(ends: tuple[int, int]) -> None:
    row, arch = TwoInputs("down", ("d",), ("hidden_size", "ffn_hidden_size"), part=Mlp), model()
    assert spans(row, arch, 1, 2) == (((0, 0, 8),), ((0, 3, 3), (3, 9, 3)))
    whole = torch.arange(96).view(8, 12)
    held = shard(row, arch, whole, 1, 2).flatten()
    seen = torch.zeros(48, dtype=torch.int64)
    for piece in cut_slices(row, arch, 1, 2, *ends):
        box = tuple(slice(a, a + n) for a, n in zip(piece.origin, piece.sizes, strict=True))
        own = slice(piece.own, piece.own + piece.elements)
        assert torch.equal(held[own].view(piece.sizes), whole[box])
        seen[own] += 1
    assert seen[slice(*ends)].eq(1).all() and seen.sum() == ends[1] - ends[0]


class Crossed(Columns):
    """The right half of a shard's columns comes from other rows than the left half."""

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        whole, local = self.measure(arch, self.dims), self.local_shape(arch, size)
        half = whole[1] // 2
        return tuple(
            Block(
                0,
                whole,
                (slice(at * local[0], (at + 1) * local[0]), slice(part * half, (part + 1) * half)),
                local,
                (slice(None), slice(part * half, (part + 1) * half)),
            )
            for part, at in enumerate((rank, size - 1 - rank))
        )


class Swapped(Columns):
    """One block, but the whole has its columns in another order below its first rows."""

    def blocks(self, arch: Architecture, rank: int, size: int) -> tuple[Block, ...]:
        whole, local = self.measure(arch, self.dims), self.local_shape(arch, size)
        rows = slice(rank * local[0], (rank + 1) * local[0])
        if size > 1:
            return (Block(0, whole, (rows,), local, (slice(None),)),)
        half, top = whole[1] // 2, slice(0, 3)
        low, left, right = slice(3, None), slice(0, half), slice(half, None)
        return (
            Block(0, whole, (top,), local, (top,)),
            Block(0, whole, (low, left), local, (low, right)),
            Block(0, whole, (low, right), local, (low, left)),
        )


@pytest.mark.parametrize("kind", [Crossed, Swapped])
def test_a_row_whose_shards_are_not_products_of_indices_is_refused(kind: type[Columns]) -> None:
    with pytest.raises(ConversionError, match=rf"up: shard 0 of 2 of this {kind.__name__} row"):
        spans(kind("up", ("u",), MLP, part=Mlp), model(), 0, 2)


def test_many_groups_in_a_joined_tensor_take_no_time_that_grows_with_their_square() -> None:
    groups = model(num_attention_heads=64, num_query_groups=64)
    row = Joined(("qkv",), Qkv("qkv", ("q", "k", "v"), ("hidden_size",)))
    calls: list[int] = []
    find = Region.find

    def counted(self: Region, flat: Indices) -> tuple[Any, list[Indices]]:
        calls.append(len(flat))
        return find(self, flat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "find", counted)
        spans.__wrapped__(row, groups, 1, 2)
    blocks = len(row.blocks(groups, 0, 1))
    assert blocks >= 3 * 64 and sum(calls) < 20 * blocks * row.local_shape(groups, 1)[0]
