"""Where tokens stand: every token once, causal attention complete and never beyond a sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.packing.tokens import FILLER, TokenLayout, packed_layout, padded_layout

RANKS = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TokenLayout, list[int]]:
    """A layout and how many tokens of each row are in it."""
    ranks = draw(RANKS)
    zigzag = 2 * ranks if ranks > 1 else 1
    row_multiple = zigzag * draw(st.integers(1, 3))
    if draw(st.booleans()):
        rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 20))
        return padded_layout(rows, width, row_multiple, ranks), [width] * rows
    lengths = draw(st.lists(st.integers(1, 20), min_size=0, max_size=5))
    width = max(lengths, default=1) + draw(st.integers(0, 3))
    return packed_layout(lengths, width, zigzag, row_multiple, ranks), lengths


def numbered(layout: TokenLayout) -> torch.Tensor:
    return torch.arange(layout.rows * layout.width).view(layout.rows, layout.width)


@given(layouts())
def test_put_inverts_take_and_leaves_zeros_elsewhere(case: tuple[TokenLayout, list[int]]) -> None:
    layout, lengths = case
    values_BS = numbered(layout) + 1
    taken = torch.stack([layout.take(values_BS, rank, filler=-7) for rank in range(layout.ranks)])
    inside = torch.arange(layout.width) < torch.tensor(lengths).view(-1, 1)
    assert torch.equal(layout.put(taken), torch.where(inside, values_BS, 0))
    pairs_BS2 = torch.stack([values_BS, -values_BS], dim=-1)
    taken = torch.stack([layout.take(pairs_BS2, rank) for rank in range(layout.ranks)])
    assert torch.equal(layout.put(taken), torch.where(inside.unsqueeze(-1), pairs_BS2, 0))


@given(layouts())
def test_every_token_stands_once(case: tuple[TokenLayout, list[int]]) -> None:
    layout, lengths = case
    sources = layout.sources_CTR.flatten()
    found = sorted(sources[sources != FILLER].tolist())
    expected = [row * layout.width + t for row, n in enumerate(lengths) for t in range(n)]
    assert found == expected


@given(layouts())
def test_all_ranks_compute_equally_many_positions(case: tuple[TokenLayout, list[int]]) -> None:
    layout, _ = case
    columns = layout.columns_CT
    assert sorted(columns.flatten().tolist()) == list(range(layout.full_length))
    assert sum(segment.length for segment in layout.segments) == layout.full_length


@given(layouts())
def test_positions_count_from_the_start_of_each_sequence(
    case: tuple[TokenLayout, list[int]],
) -> None:
    layout, _ = case
    place_BS = torch.arange(layout.width).repeat(layout.rows, 1)
    for rank in range(layout.ranks):
        real_TR = layout.sources_CTR[rank] != FILLER
        expected_TR = layout.take(place_BS, rank)
        positions_TR = layout.positions_CT[rank].unsqueeze(1).expand_as(expected_TR)
        assert torch.equal(positions_TR[real_TR], expected_TR[real_TR])


@given(layouts())
def test_pieces_are_causal_attention_within_each_sequence(
    case: tuple[TokenLayout, list[int]],
) -> None:
    layout, _ = case
    length = layout.full_length
    seen = torch.zeros(length, length, dtype=torch.long)
    for rank in range(layout.ranks):
        columns_T = layout.columns_CT[rank]
        for piece in layout.pieces(rank):
            for index in range(piece.queries):
                keys = piece.keys - piece.queries + index + 1
                seen[columns_T[piece.query + index], piece.key : piece.key + keys] += 1
    segment = torch.cat(
        [torch.full((s.length,), number) for number, s in enumerate(layout.segments)]
    )
    causal = torch.ones(length, length).tril().bool() & (segment.unsqueeze(1) == segment)
    assert torch.equal(seen, causal.long())


@pytest.mark.parametrize("ranks", [2, 4])
def test_causal_attention_costs_every_rank_the_same(ranks: int) -> None:
    layout = packed_layout([24, 8, 40], 40, 2 * ranks, 2 * ranks, ranks)
    pairs = [
        sum(
            piece.queries * piece.keys - piece.queries * (piece.queries - 1) // 2
            for piece in layout.pieces(rank)
        )
        for rank in range(ranks)
    ]
    assert len(set(pairs)) == 1, pairs


def test_a_padded_row_on_one_rank_is_plain_and_a_packed_one_is_not() -> None:
    assert padded_layout(3, 5, 4, 1).plain
    assert packed_layout([5], 5, 1, 1, 1).plain
    assert not packed_layout([5, 2], 5, 1, 1, 1).plain
    assert not padded_layout(3, 5, 4, 2).plain


def test_nothing_to_pack_is_filler_that_all_ranks_can_split() -> None:
    layout = packed_layout([], 7, 4, 8, 2)
    assert layout.sources_CTR.shape == (2, 4, 1)
    assert (layout.sources_CTR == FILLER).all()
    assert layout.put(torch.ones(2, 4, 1)).shape == (0, 7)
