"""Ranges of tensors as pieces of parameters, parameters as bytes in files: every element once."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_policy.converters.formats.stored import Chunk, Stored, tiled
from megatron_policy.converters.rows.blocks import Block
from megatron_policy.converters.rows.regions import boxes
from megatron_policy.converters.rows.runs import Correspondence


@st.composite
def blocks(draw: Any) -> Block:
    """A box of steps and gaps on both sides, its last two dimensions exchanged or not."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    transposed = len(counts) > 1 and draw(st.booleans())
    turned = [*counts[:-2], *reversed(counts[-2:])] if transposed else counts

    def side(sizes: list[int]) -> tuple[tuple[int, ...], tuple[slice, ...]]:
        view, index = [], []
        for n in sizes:
            step = draw(st.sampled_from((1, 1, 2, 3)))
            start, rest = draw(st.sampled_from((0, 0, 1, 2))), draw(st.sampled_from((0, 0, 1)))
            stop = start + (n - 1) * step + 1
            view.append(stop + rest)
            index.append(slice(start, stop, step))
        return tuple(view), tuple(index)

    hf, own = side(counts), side(turned)
    if draw(st.booleans()):
        own = (1, *own[0]), (slice(None), *own[1])
    return Block(0, *hf, *own, transposed)


@settings(max_examples=200)
@given(block=blocks(), data=st.data())
def test_the_pieces_of_any_ranges_move_just_the_elements_of_the_block(
    block: Block, data: st.DataObject
) -> None:
    total = math.prod(block.hf_view)
    cuts = data.draw(st.lists(st.integers(0, total), max_size=4).map(sorted))
    hf = torch.arange(total)
    whole = torch.full((math.prod(block.shard_view),), -1)
    taken = hf.view(block.hf_view)[block.hf_index]
    whole.view(block.shard_view)[block.shard_index] = taken.mT if block.transposed else taken
    box = Correspondence.of(block)
    there, back = torch.full_like(whole, -1), torch.full_like(hf, -1)
    for first, last in pairwise([0, *cuts, total]):
        values = torch.full((last - first,), -1)
        for piece in box.pieces(first, last):
            assert piece.is_plain or not box.is_plain
            elements = hf[first:last].as_strided(
                piece.sizes, piece.hf_strides, first + piece.hf_offset
            )
            runs = list(piece.runs())
            parts = elements.reshape(-1).split([length for _, length in runs])
            for (at, length), part in zip(runs, parts, strict=True):
                there[at : at + length] = part
            for place, at, length in piece.common_runs():
                values[place : place + length] = whole[at : at + length]
        back[first:last] = values
    assert torch.equal(there, whole)
    assert torch.equal(back[back >= 0], taken.reshape(-1).sort().values)
    assert torch.equal(back[back >= 0], hf[back >= 0])


@given(shape=st.lists(st.integers(1, 4), max_size=4).map(tuple), data=st.data())
def test_a_range_is_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    first, last = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    whole = torch.arange(total).view(shape)
    found = [
        whole[tuple(slice(*bounds) for bounds in box)].reshape(-1)
        for box in boxes(shape, first, last)
    ]
    assert torch.equal(torch.cat([torch.arange(0), *found]), torch.arange(first, last))
    assert len(found) <= max(1, 2 * len(shape))


@pytest.mark.parametrize("rows", [[(0, 6)], [(0, 1), (1, 4), (4, 6)]])
@pytest.mark.parametrize("columns", [[(0, 4)], [(0, 2), (2, 4)], [(0, 3), (3, 4)]])
def test_a_range_of_a_tensor_in_chunks_is_found_wherever_they_lie(
    rows: list[tuple[int, int]], columns: list[tuple[int, int]]
) -> None:
    whole = torch.arange(24, dtype=torch.int16).view(6, 4)
    file, chunks = b"", []
    for r in reversed(rows):
        for c in columns:
            file += b"frame"
            origin, sizes = (r[0], c[0]), (r[1] - r[0], c[1] - c[0])
            chunks.append(Chunk(Path("f"), len(file), origin, sizes))
            file += whole[slice(*r), slice(*c)].numpy().tobytes()
    stored = Stored((5, 4), torch.int16, chunks)  # the last row is padding
    for first in range(20):
        for last in range(first + 1, 21):
            found = bytearray(2 * (last - first))
            for path, offset, spans in stored.transfers(first, last - first):
                assert path == Path("f")
                for begin, end in spans:
                    found[begin:end] = file[offset : offset + end - begin]
                    offset += end - begin
            assert bytes(found) == whole.view(-1)[first:last].numpy().tobytes()
    assert sum(end - begin for _, begin, end in stored.extents()) == 40


@pytest.mark.parametrize(
    ("boxes_", "fills"),
    [
        ([((0, 0), (4, 2)), ((0, 2), (4, 2))], True),
        ([((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], True),  # no grid
        ([((0, 0), (4, 2))], False),
        ([((0, 0), (4, 2)), ((0, 0), (4, 2))], False),
        ([((0, 0), (4, 3)), ((0, 2), (2, 2))], False),
        ([((0, 0), (5, 2)), ((0, 2), (3, 2))], False),
        ([], False),
    ],
)
def test_boxes_that_overlap_or_leave_gaps_do_not_fill_a_tensor(
    boxes_: list[tuple[tuple[int, ...], tuple[int, ...]]], fills: bool
) -> None:
    assert tiled((4, 4), boxes_) is fills
    assert tiled((), [((), ())]) and not tiled((), [])  # the only box of a scalar


@pytest.mark.parametrize(("overlap", "gap"), [(False, False), (True, False), (True, True)])
def test_many_boxes_that_are_cut_in_no_regular_way_are_told_without_comparing_each_with_each(
    overlap: bool, gap: bool
) -> None:
    """Of 40,000 bricks, every other row moved by half a brick, in two layers: 800 million pairs."""
    rows, bricks = 100, 200
    boxes_ = []
    for row in range(rows):
        edges = [0, *range(1 + row % 2, 2 * bricks, 2), 2 * bricks]
        for layer in range(2):
            boxes_ += [
                ((layer, row, a), (1, 1, b - a)) for a, b in pairwise(sorted({*edges})) if b > a
            ]
    # One brick across both layers keeps the cuts from being straight.
    boxes_ = [box for box in boxes_ if box[0] != (1, 0, 1) and box[0] != (0, 0, 1)]
    boxes_.append(((0, 0, 1), (2, 1, 2)))
    if overlap:
        boxes_[0] = (boxes_[1][0], boxes_[0][1])
    if gap:
        boxes_.pop()
    assert tiled((2, rows, 2 * bricks), boxes_) is not (overlap or gap)
