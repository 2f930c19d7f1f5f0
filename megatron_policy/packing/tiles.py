"""Cuts attention into rectangular tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_policy.packing.tokens import AttentionPiece

# Queries per tile of a window: few enough that most keys of the tile are in all their windows.
BLOCK = 512
# Mask rows are a multiple of this long: kernels would otherwise copy masks to align them.
_ALIGNMENT = 16


@dataclass(frozen=True)
class AttentionTile:
    """Queries `[query, query + queries)` see keys `[key, key + keys)`, aligned at the lower right
    corner, or each of them all, of which `ahead` are beyond the last query's own. If `reach` is not
    None, a query sees no key further back than that.
    """

    query: int
    queries: int
    key: int
    keys: int
    reach: int | None
    ahead: int | None = None

    @property
    def shape(self) -> tuple[int, int, int | None, int | None]:
        """Everything its mask depends on."""
        return self.queries, self.keys, self.reach, self.ahead


def tiles(
    pieces: Iterable[AttentionPiece], reach: int | None, explicit: bool = False
) -> tuple[AttentionTile, ...]:
    """The tiles of these pieces, in the order of their queries; `reach` is that of a sliding
    window, in positions before a query's own.

    With a window or explicit scores a tile has at most one block of queries.
    """
    found: list[AttentionTile] = []
    for piece in pieces:
        if piece.queries == 0:
            continue
        whole = reach is None or piece.keys - (piece.ahead or 0) <= reach + 1
        if whole and not explicit:
            sizes = (piece.query, piece.queries, piece.key, piece.keys)
            found.append(AttentionTile(*sizes, None, piece.ahead))
        else:
            found.extend(_blocks(piece, reach))
    return tuple(found)


def _blocks(piece: AttentionPiece, reach: int | None) -> Iterator[AttentionTile]:
    before = piece.keys - (piece.ahead or 0) - piece.queries
    for start in range(0, piece.queries, BLOCK):
        queries = min(BLOCK, piece.queries - start)
        own = before + start + queries
        ahead = None if piece.ahead is None else piece.keys - own
        end = own + (ahead or 0)
        keys, hidden = end, None
        if reach is not None:
            seen = queries + reach + end - own
            if queries > 1:
                seen += -seen % _ALIGNMENT
            keys = min(end, seen)
            hidden = reach if keys - (end - own) > reach + 1 else None
        first = piece.key + end - keys
        yield AttentionTile(piece.query + start, queries, first, keys, hidden, ahead)
