"""Slices of flat shards against sharding itself, for every row of every family."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_policy.checkpoint.local_shards import cut_pieces, cut_slices, divide
from megatron_policy.converters.architecture import Architecture, Moe, Scoring
from megatron_policy.converters.rows import Row, Whole, shard
from megatron_policy.converters.rows.expert_rows import (
    StackedGateAboveUp,
    StackedGateUp,
    StackedInputs,
    StackedRows,
    StackedWhole,
)
from megatron_policy.converters.rows.shards import unpadded_shape
from megatron_policy.errors import ConversionError
from tests.pure.test_rows import KINDS, SIZES, model

EXPERTS = [
    StackedGateUp("fc1", ("gate_up",), ("hidden_size",), expert=1),
    StackedGateUp("fc1.bias", ("gate_up.bias",), (), expert=2),
    StackedRows("fc2", ("down",), ("hidden_size", "ffn_hidden_size"), expert=1),
    StackedWhole("fc2.bias", ("down.bias",), ("hidden_size",), expert=0),
    StackedGateAboveUp("fc1", ("input",), ("hidden_size",), expert=2),
    StackedInputs("fc2", ("output",), ("hidden_size", "ffn_hidden_size"), expert=1),
]


def architecture(groups: int) -> Architecture:
    moe = Moe(experts=3, chosen=2, ffn_hidden_size=12, scoring=Scoring.SOFTMAX)
    return model(num_query_groups=groups, moe=moe)


def legal(row: Row) -> list[tuple[int, Architecture]]:
    """Sizes that the row can be split over, each with the model that is split."""
    found = []
    for size, groups in product(SIZES, (1, 2, 4)):
        with suppress(ConversionError):
            row.blocks(architecture(groups), 0, size)
            found.append((size, architecture(groups)))
    return found


@pytest.mark.parametrize("rows", [*KINDS.values(), *([row] for row in EXPERTS)])
@settings(max_examples=20)
@given(st.data())
def test_a_slice_of_a_shard_is_that_box_of_the_whole(rows: list[Row], data) -> None:
    row = data.draw(st.sampled_from(rows))
    size, arch = data.draw(st.sampled_from(legal(row)))
    whole = torch.arange(1, torch.Size(row.local_shape(arch, 1)).numel() + 1)
    whole = whole.view(row.local_shape(arch, 1))
    pieces = [shard(row, arch, whole, rank, size) for rank in range(size)]
    real = whole[: unpadded_shape(row, arch)[0]] if whole.dim() else whole
    seen = torch.zeros_like(real)
    for rank, own in enumerate(pieces):
        flat = own.flatten()
        cut = data.draw(st.integers(0, flat.numel()))
        found = [
            piece
            for ends in ((0, cut), (cut, flat.numel()))
            for slice_ in cut_slices(row, arch, rank, size, *ends)
            for piece in cut_pieces(slice_, data.draw(st.integers(1, 40)))
        ]
        for piece in found:
            box = tuple(slice(a, a + n) for a, n in zip(piece.origin, piece.sizes, strict=True))
            held = flat[piece.own : piece.own + piece.elements]
            assert torch.equal(held.view(piece.sizes), real[box])
            seen[box] += 1
    held_by = size if isinstance(row, Whole | StackedWhole) else 1
    assert (seen == held_by).all()


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([2, 4]))), st.integers(1, 7))
def test_the_shares_of_all_ranks_are_every_element_once(lengths, count: int) -> None:
    for position, (elements, _) in enumerate(lengths):
        cuts = [divide(lengths, rank, count)[position] for rank in range(count)]
        assert cuts[0][0] == 0 and cuts[-1][1] == elements
        assert all(a[1] == b[0] for a, b in pairwise(cuts))
    total = sum(elements * size for elements, size in lengths)
    for rank in range(count):
        own = divide(lengths, rank, count)
        nbytes = sum((b - a) * size for (a, b), (_, size) in zip(own, lengths, strict=True))
        assert abs(nbytes - total / count) <= 4
