"""Blocks of tokens that see each other in both directions: pictures, in all layouts.

Shapes: B rows, S positions, L positions of all ranks, R rows that are computed in parallel, H head
dim.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.attention import tile_attention
from megatron_policy.attention.causal import Scores, attend, sequences_in
from megatron_policy.attention.tile_attention import softcap
from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import PictureMedium, Shell
from megatron_policy.packing.microbatch import find_blocks
from megatron_policy.packing.tokens import TokenLayout
from megatron_policy.policy.generation import _cut_rows
from tests.pure.test_tokens import layouts

HEAD_DIM = 4
SHELL = Shell(
    tensors=(("tower.weight", (4, 3, 2, 2)),),
    prefix="",
    media=(PictureMedium(7, "pixel_values", 1, patch=2, channels=3, fixed=(2, 4)),),
    both_ways=True,
)


@st.composite
def with_blocks(draw: st.DrawFn) -> tuple[TokenLayout, list[list[range]]]:
    """A layout, and blocks of its rows' tokens."""
    layout, lengths = draw(layouts())
    found = []
    for length in lengths:
        ends = draw(st.sets(st.integers(0, length), max_size=6))
        places = sorted(ends)[: len(ends) // 2 * 2]
        found.append([range(*places[at : at + 2]) for at in range(0, len(places), 2)])
    return layout, found


def see(layout: TokenLayout, blocks: list[list[range]], reach: int | None) -> torch.Tensor:
    """Which key of a row each query sees, bool `[R, L, L]`."""
    packed = len(layout.segments) > 1 or layout.sources_CTR.size(2) == 1
    seen_RLL = torch.zeros(layout.sources_CTR.size(2), *[layout.full_length] * 2).bool()
    for row, seen_LL in enumerate(seen_RLL):
        for number, segment in enumerate(layout.segments):
            own = slice(segment.start, segment.start + segment.length)
            seen = torch.ones(segment.length, segment.length).tril().bool()
            of_row = number if packed else row
            for block in blocks[of_row] if of_row < len(blocks) else ():
                seen[block.start : block.stop, block.start : block.stop] = True
            if reach is not None:
                seen &= torch.ones_like(seen).triu(-reach)
            seen_LL[own, own] = seen
    return seen_RLL


@given(with_blocks(), st.one_of(st.none(), st.integers(0, 6)), st.sampled_from([None, 2.0]))
def test_tokens_of_a_block_see_each_other_and_all_before_them_in_every_layout(
    case: tuple[TokenLayout, list[list[range]]], reach: int | None, cap: float | None
) -> None:
    layout, blocks = case
    random, rows = torch.Generator().manual_seed(0), layout.sources_CTR.size(2)
    query, key, value = torch.randn(3, layout.full_length, rows, 1, HEAD_DIM, generator=random)
    scores_RLL = query[:, :, 0].transpose(0, 1) @ key[:, :, 0].permute(1, 2, 0)
    scores_RLL = scores_RLL if cap is None else softcap(scores_RLL, cap)
    scores_RLL = scores_RLL.masked_fill(~see(layout, blocks, reach), float("-inf"))
    expected_LRH = (scores_RLL.softmax(-1) @ value[:, :, 0].transpose(0, 1)).transpose(0, 1)
    for rank, columns_T in enumerate(layout.columns_CT):
        group = SimpleNamespace(size=lambda: layout.ranks, rank=lambda rank=rank: rank)
        sequences = replace(sequences_in(layout, group, blocks), order=None)
        with patch.object(tile_attention, "BLOCK", 4):
            found = attend(query[columns_T], key, value, Scores(1.0, reach, cap), sequences)
        torch.testing.assert_close(found, expected_LRH[columns_T], rtol=1e-5, atol=1e-5)


def test_blocks_are_pictures_and_not_what_was_drawn() -> None:
    tokens_BS = torch.tensor([[1, 7, 7, 7, 1, 7, 7, 9], [1, 7, 7, 1, 7, 7, 1, 7], [1, 7] * 4])
    pictures = (torch.ones(2, 3, 2, 4), torch.ones(2, 3, 2, 4), None)
    data = BatchedDataDict(
        {
            "input_ids": tokens_BS,
            "input_lengths": torch.tensor([8, 8, 8]),
            "token_mask": torch.zeros(3, 8),
            "pixel_values": [pictures[0][:1], pictures[1], None],
        }
    )
    data["token_mask"][0, 3:] = 1
    data["token_mask"][1, 7] = 1
    data["token_mask"][2] = 1
    assert find_blocks(SHELL, data) == [[range(1, 3)], [range(1, 3), range(4, 6)], []]
    assert find_blocks(replace(SHELL, both_ways=False), data) == ()
    assert find_blocks(None, data) == ()
    assert find_blocks(SHELL, data.select_indices([2])) == ()


@pytest.mark.parametrize(
    ("lengths", "ends", "most", "expected"),
    [
        ([5, 4, 3, 6], [0, 0, 0, 0], 3, [(0, 3), (3, 4)]),
        ([5, 4, 3, 6], [3, 0, 0, 6], 9, [(0, 3), (3, 4)]),
        ([5, 4, 3, 6], [4, 3, 3, 0], 9, [(0, 2), (2, 4)]),
        ([2, 9, 9], [2, 8, 9], 9, [(0, 1), (1, 3)]),
        ([], [], 4, []),
    ],
)
def test_rows_share_a_cache_if_pictures_of_all_enter_at_once(
    lengths: list[int], ends: list[int], most: int, expected: list[tuple[int, int]]
) -> None:
    assert [*_cut_rows(lengths, ends, most)] == expected
