"""Cuts causal attention into rectangular tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_policy.packing.tokens import CausalRectangle

# Queries per tile of a window: few enough that most keys of the tile are in all their windows.
BLOCK = 512
# Mask rows are a multiple of this long: kernels would otherwise copy masks to align them.
_ALIGNMENT = 16


@dataclass(frozen=True)
class AttentionTile:
    """Queries `[query, query + queries)` see keys `[key, key + keys)`, aligned at the lower right
    corner. If `reach` is not None, a query sees no key further back than that.
    """

    query: int
    queries: int
    key: int
    keys: int
    reach: int | None

    @property
    def shape(self) -> tuple[int, int, int | None]:
        """Everything its mask depends on."""
        return self.queries, self.keys, self.reach


def tiles(
    pieces: Iterable[CausalRectangle], reach: int | None, explicit: bool = False
) -> tuple[AttentionTile, ...]:
    """The tiles of these pieces, in the order of their queries; `reach` is that of a sliding
    window, in positions before a query's own.

    With a window or explicit scores a tile has at most one block of queries.
    """
    found: list[AttentionTile] = []
    for piece in pieces:
        if piece.queries == 0:
            continue
        whole = reach is None or piece.keys <= reach + 1
        if whole and not explicit:
            found.append(AttentionTile(piece.query, piece.queries, piece.key, piece.keys, None))
        else:
            found.extend(_blocks(piece, reach))
    return tuple(found)


def _blocks(piece: CausalRectangle, reach: int | None) -> Iterator[AttentionTile]:
    before = piece.keys - piece.queries
    for start in range(0, piece.queries, BLOCK):
        queries = min(BLOCK, piece.queries - start)
        end = before + start + queries
        keys, hidden = end, None
        if reach is not None:
            seen = queries + reach
            if queries > 1:
                seen += -seen % _ALIGNMENT
            keys = min(end, seen)
            hidden = reach if keys > reach + 1 else None
        yield AttentionTile(piece.query + start, queries, piece.key + end - keys, keys, hidden)
