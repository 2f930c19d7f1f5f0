"""Tiles cover exactly what causal attention in a window is, and are never large where it is not."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.attention import tile_attention as module
from megatron_policy.attention.tile_attention import BLOCK, cut, mask, tiles
from megatron_policy.packing.tokens import AttentionPiece, packed_layout

PIECES = st.lists(
    st.tuples(st.integers(0, 3 * BLOCK), st.integers(0, 2 * BLOCK)), min_size=1, max_size=4
)


def pieces_of(drawn: list[tuple[int, int]]) -> list[AttentionPiece]:
    """Of so many queries, with so many keys before them."""
    pieces, query, key = [], 0, 0
    for queries, before in drawn:
        pieces.append(AttentionPiece(query, queries, key, queries + before))
        query, key = query + queries, key + queries + before
    return pieces


@given(PIECES, st.one_of(st.none(), st.integers(0, 3 * BLOCK)))
def test_every_query_sees_its_window_and_no_other_key(
    drawn: list[tuple[int, int]], reach: int | None
) -> None:
    pieces = pieces_of(drawn)
    found = tiles(pieces, reach)
    assert [t.query for t in found] == sorted(t.query for t in found)
    first, last = {}, {}
    for tile in found:
        assert 0 < tile.queries <= tile.keys
        for index in {0, tile.queries // 2, tile.queries - 1}:
            seen = tile.keys - tile.queries + index
            last[tile.query + index] = tile.key + seen
            back = seen if tile.reach is None else min(seen, tile.reach)
            first[tile.query + index] = tile.key + seen - back
    assert sum(t.queries for t in found) == sum(p.queries for p in pieces)
    for piece in pieces:
        for query in set(range(piece.query, piece.query + piece.queries)) & set(first):
            own = piece.key + piece.keys - piece.queries + query - piece.query
            expected = piece.key if reach is None else max(piece.key, own - reach)
            assert (first[query], last[query]) == (expected, own)


@given(PIECES, st.integers(0, 3 * BLOCK))
def test_no_mask_of_a_window_is_longer_than_a_block_and_the_window(
    drawn: list[tuple[int, int]], reach: int
) -> None:
    for tile in tiles(pieces_of(drawn), reach):
        assert tile.queries <= BLOCK or tile.keys <= reach + 1
        assert tile.keys <= reach + BLOCK + 16
        assert (tile.reach is None) == (tile.keys <= reach + 1)


def test_a_window_that_holds_a_whole_sequence_needs_no_mask() -> None:
    layout = packed_layout([5, 9, 1], 9, 1, 16, 1)
    plain = tiles(layout.pieces(0), None)
    assert tiles(layout.pieces(0), 8) == plain
    assert all(t.queries == t.keys for t in plain)
    assert tiles(layout.pieces(0), 7) != plain


def test_a_mask_shows_each_query_the_keys_of_its_window(monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 4)
    for tile in tiles([AttentionPiece(0, 6, 0, 9)], 2):
        bias = mask(tile, torch.zeros((), dtype=torch.bfloat16))
        assert bias.dtype == torch.bfloat16 and bias.shape == (tile.queries, tile.keys)
        for row, shown in enumerate((bias == 0).tolist()):
            own = tile.key + tile.keys - tile.queries + row
            keys = [tile.key + key for key, seen in enumerate(shown) if seen]
            assert keys == [key for key in range(own - 2, own + 1) if key >= 0]


def test_gradients_of_overlapping_cuts_add_up() -> None:
    ranges = [(0, 3), (2, 4), (5, 0), (1, 5)]
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    assert [part.tolist() for part in cut(x, ranges)] == [x[a : a + n].tolist() for a, n in ranges]
    assert torch.autograd.gradcheck(lambda x: torch.cat(cut(x, ranges)), (x,))
    # One that nothing depends on is not part of the sum.
    parts = cut(x, ranges)
    (grad,) = torch.autograd.grad(parts[1].sum(), x)
    assert grad[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 0]
