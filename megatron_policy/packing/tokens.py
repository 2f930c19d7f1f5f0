"""Maps the tokens of a microbatch to the positions that each context-parallel rank computes.

Context parallelism is zig-zag: a sequence is cut into 2C chunks, of which rank r computes the r-th
from the front and the r-th from the back, so that causal attention costs every rank the same.
Source: Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2; Megatron-Core's layout is the
same.

Shapes: B rows and S positions of the caller, C context-parallel ranks, T positions of one of them,
R rows that are computed in parallel (B when padded, 1 when packed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, repeat

import torch

from megatron_policy.packing.multiples import round_up

FILLER = -1
"""Marks a position without a token of the caller."""


@dataclass(frozen=True)
class PackedSequence:
    """One sequence with its padding, `[start, start + length)` among the positions of all ranks;
    several packed sequences make a row.
    """

    start: int
    length: int


Blocks = Sequence[Sequence[range]]
"""Of each sequence, the runs of tokens that see each other in both directions."""


@dataclass(frozen=True)
class AttentionPiece:
    """A rectangle of attention: this rank's queries `[query, query + queries)` see the keys
    `[key, key + keys)` of all ranks. If it is causal, the last query sees all of them, the one
    before it all but the last, and so on (aligned at the lower right corner).
    """

    query: int
    queries: int
    key: int
    keys: int
    ahead: int | None = None
    """None if it is causal. Else each query sees all keys, the last of which are so many positions
    beyond the last query's own.
    """


@dataclass(frozen=True)
class TokenLayout:
    """The map between the caller's rows `[B, S]` and what the ranks of a context-parallel group
    compute.

    `sources_CTR` holds, for every rank, the flat index (row * S + position) of the token at each of
    its positions, or FILLER. Filler only follows the tokens of its segment, so causal attention
    keeps it from affecting them. All tensors are made on the CPU, by which a device is not waited
    for.
    """

    rows: int
    width: int
    segments: tuple[PackedSequence, ...]
    columns_CT: torch.Tensor
    """For each rank, which of all ranks' positions it has."""
    sources_CTR: torch.Tensor
    positions_CT: torch.Tensor
    """For each rank, the positions of its tokens in their sequences, int64; alike in all rows."""
    where_BS: torch.Tensor
    """The flat index among all ranks' positions `[C, T, R]` of each of the caller's, or FILLER."""
    order_CT: torch.Tensor
    """Index that sorts what is gathered from the ranks, `[C * T]`, into the order of all ranks'
    positions.
    """

    @property
    def ranks(self) -> int:
        """C, the number of context-parallel ranks."""
        return self.columns_CT.size(0)

    @property
    def full_length(self) -> int:
        """Positions of all ranks, C * T."""
        return self.columns_CT.numel()

    @property
    def plain(self) -> bool:
        """Whether every row is one sequence that one rank computes from its first position on."""
        return self.ranks == 1 and len(self.segments) == 1

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> TokenLayout:
        """The same with the tensors that index others where `move` puts them."""
        return replace(
            self,
            sources_CTR=move(self.sources_CTR),
            positions_CT=move(self.positions_CT),
            where_BS=move(self.where_BS),
            order_CT=move(self.order_CT),
        )

    def take(self, values_BS: torch.Tensor, rank: int, filler: float = 0) -> torch.Tensor:
        """`values_BS[B, S, ...]` in rank `rank`'s layout, `[T, R, ...]`."""
        # FILLER is -1, which indexes the filler value appended last.
        last = values_BS.new_full((1, *values_BS.shape[2:]), filler)
        return torch.cat([values_BS.flatten(0, 1), last])[self.sources_CTR[rank]]

    def take_positions(self, rank: int, positions_BS: torch.Tensor | None) -> torch.Tensor:
        """`positions_BS`, or three of each token, in rank `rank`'s layout, `[T, R]` or `[T, R, 3]`;
        those of tokens that are numbered from 0 in each sequence if it is None.
        """
        if positions_BS is not None:
            return self.take(positions_BS, rank)
        return self.positions_CT[rank].unsqueeze(1).expand_as(self.sources_CTR[rank])

    def put(self, values_CTR: torch.Tensor) -> torch.Tensor:
        """All ranks' values `[C, T, R, ...]` at the caller's places `[B, S, ...]`, 0 where there is
        none; the inverse of `take`, differentiable.
        """
        rest = values_CTR.shape[3:]
        where_BS = self.where_BS
        found = values_CTR.reshape(-1, *rest)[where_BS.clamp(min=0)]
        missing = (where_BS == FILLER).view(*where_BS.shape, *[1] * len(rest))
        return found.masked_fill_(missing, 0)

    def pieces(self, rank: int, blocks: Blocks = ()) -> tuple[AttentionPiece, ...]:
        """The pieces of rank `rank`'s attention, causal but for the `blocks` of its segments; its
        queries in order, each once.
        """
        return attention_pieces(self.segments, self.ranks, rank, blocks)

    def pieces_by_rows(
        self, rank: int, blocks_B: Blocks = ()
    ) -> tuple[tuple[int, tuple[AttentionPiece, ...]], ...]:
        """How many neighbouring rows of what is computed have the same pieces, and these, for all
        rows, of the caller's rows with these blocks.
        """
        rows = self.sources_CTR.size(2)
        if not blocks_B or rows == 1:
            return ((rows, self.pieces(rank, blocks_B)),)
        alike = ((blocks, len([*same])) for blocks, same in groupby(blocks_B))
        return tuple((count, self.pieces(rank, [blocks])) for blocks, count in alike)


def attention_pieces(
    segments: Iterable[PackedSequence], ranks: int, rank: int, blocks: Blocks = ()
) -> tuple[AttentionPiece, ...]:
    """The pieces of attention within the segments that rank `rank` of `ranks` computes, causal but
    for the `blocks` of the first segments; its queries in order, each once.
    """
    found: list[AttentionPiece] = []
    numbers = [0] if ranks == 1 else [rank, 2 * ranks - 1 - rank]
    for segment, own in zip(segments, chain(blocks, repeat(())), strict=False):
        chunk, first = segment.length // (ranks * len(numbers)), segment.start // ranks
        for index, number in enumerate(numbers):
            query = first + index * chunk
            piece = AttentionPiece(query, chunk, segment.start, (number + 1) * chunk)
            found.extend(_cut_out(own, piece))
    return tuple(found)


def _cut_out(blocks: Sequence[range], piece: AttentionPiece) -> Iterator[AttentionPiece]:
    """A causal piece without its queries in these blocks, in order, and pieces of those."""
    first = done = piece.keys - piece.queries

    def part(start: int, stop: int, ahead: int | None = None) -> AttentionPiece:
        queries = (piece.query + start - first, stop - start)
        return AttentionPiece(*queries, piece.key, stop + (ahead or 0), ahead)

    for block in blocks:
        start, stop = max(block.start, first), min(block.stop, piece.keys)
        if start < stop:
            if done < start:
                yield part(done, start)
            yield part(start, stop, block.stop - stop)
            done = stop
    if done < piece.keys or not piece.queries:
        yield part(done, piece.keys)


def padded_layout(rows: int, width: int, multiple: int, ranks: int) -> TokenLayout:
    """A layout in which each of `rows` rows of `width` positions is a sequence, filled up to a
    multiple of `multiple`, which 2 * `ranks` divides under context parallelism.
    """
    length = round_up(width, multiple)
    source_BS = torch.full((rows, length), FILLER)
    source_BS[:, :width] = torch.arange(rows * width).view(rows, width)
    return _layout(rows, width, (PackedSequence(0, length),), source_BS.T, ranks)


def packed_layout(
    lengths: Sequence[int], width: int, segment_multiple: int, total_multiple: int, ranks: int
) -> TokenLayout:
    """A layout of the first `lengths[i]` tokens of each row, concatenated into a single row.

    Every sequence is filled up to a multiple of `segment_multiple`, and the whole to a multiple of
    `total_multiple` by filler that is its own segment; 2 * `ranks` divides both under context
    parallelism. Without any tokens the layout is one segment of filler.
    """
    segments, parts = [], []
    start = 0
    for row, length in enumerate(lengths):
        padded = round_up(length, segment_multiple)
        part = torch.full((padded,), FILLER)
        part[:length] = row * width + torch.arange(length)
        segments.append(PackedSequence(start, padded))
        parts.append(part)
        start += padded
    missing = round_up(max(start, 1), total_multiple) - start
    if missing:
        segments.append(PackedSequence(start, missing))
        parts.append(torch.full((missing,), FILLER))
    source_T1 = torch.cat(parts).unsqueeze(1)
    return _layout(len(lengths), width, tuple(segments), source_T1, ranks)


def _layout(
    rows: int, width: int, segments: tuple[PackedSequence, ...], source_TR: torch.Tensor, ranks: int
) -> TokenLayout:
    columns_CT = torch.stack([_zigzag(segments, rank, ranks) for rank in range(ranks)])
    sources_CTR = source_TR[columns_CT]
    sources = sources_CTR.flatten()
    real = (sources != FILLER).nonzero().squeeze(-1)
    where = sources.new_full((rows * width,), FILLER)
    where[sources[real]] = real
    within_T = torch.cat([torch.arange(segment.length) for segment in segments])
    return TokenLayout(
        rows,
        width,
        segments,
        columns_CT,
        sources_CTR,
        within_T[columns_CT],
        where.view(rows, width),
        columns_CT.flatten().argsort(),
    )


def _zigzag(segments: Sequence[PackedSequence], rank: int, ranks: int) -> torch.Tensor:
    if ranks == 1:
        return torch.arange(sum(segment.length for segment in segments))
    parts = []
    for segment in segments:
        chunk, left = divmod(segment.length, 2 * ranks)
        assert left == 0, (segment, ranks)
        for number in (rank, 2 * ranks - 1 - rank):
            parts.append(torch.arange(chunk) + segment.start + number * chunk)
    return torch.cat(parts)
