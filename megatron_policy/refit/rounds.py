"""Streams tensors that ranks hold between them: shards, pipeline stages and experts.

They are exchanged in rounds through one buffer of at most one bucket; the next round runs while the
last tensors are consumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from megatron_policy.converters.rows.regions import Region
from megatron_policy.coordination.process_group import BoundedProcessGroup, PendingCollective
from megatron_policy.memory.pinned_pool import PinnedMemoryPool, PoolSlice, page_locked
from megatron_policy.refit.buffers import Buffer, BufferSlice, align
from megatron_policy.refit.plan import Exchange, Item, Part
from megatron_policy.refit.sources import Filled, Place, Sources
from megatron_policy.weights.geometry import Segment, overlaps, segments

Pending = Sequence[PendingCollective]

Kept = Sequence[tuple[int, PoolSlice]]
"""Of each round, what a rank has for it, and the byte of its chunk at which that begins."""


def stream_together(exchange: Exchange, rounds: Rounds, place: Place) -> Filled:
    """For ranks that hold the items between them."""
    if not exchange.rounds:
        return
    under_way = rounds.start(0)
    target: BufferSlice | None = None
    for number in range(exchange.rounds):
        rounds.complete(number, under_way)
        for item, begin, end in exchange.in_round(number):
            if begin == 0 and item.first:
                target = place(item.tensor)
            if target is not None:
                rounds.unpack(item, begin, end, target)
            if end == item.elements and item.last:
                yield item.tensor, target
        if number + 1 < exchange.rounds:
            under_way = rounds.start(number + 1)


class Rounds:
    """The rounds of items that every rank of `group` has a share of, over `group` and over the
    pipeline group `pp`: a buffer in `shards` parts, each a chunk of a rank's stream. Ranks count
    tensor-parallel ranks fastest.
    """

    def __init__(
        self,
        exchange: Exchange,
        sources: Sources,
        group: BoundedProcessGroup,
        pp: BoundedProcessGroup,
        kept: Kept | None = None,
    ) -> None:
        """With `kept`, what `keep` has returned, this rank sends that, from host memory."""
        self._exchange, self._sources, self._group, self._pp = exchange, sources, group, pp
        self._kept, nbytes = kept, align(exchange.shards * exchange.chunk)
        self._buffer = (
            Buffer.on(sources.probe.device, nbytes) if kept is None else Buffer(page_locked(nbytes))
        )
        self._several = len(exchange.stages) > 1
        self._own = group.rank % exchange.shards

    def keep(self, pool: PinnedMemoryPool) -> Kept:
        """Copies of what this rank has for each round, in the pool's memory. On a GPU they are
        complete when it has finished what is queued.
        """
        kept, part = [], self._part(self._own)
        for number in range(self._exchange.rounds):
            begin, end = self._exchange.own_range(number, self._pp.rank, self._owner)
            pieces = pool.take(end - begin)
            self._pack_own(number)
            for piece, own in zip(pieces, _cut(part[begin:end], pieces), strict=True):
                piece.copy_(own, non_blocking=True)
            kept.append((begin, pieces))
        return kept

    def start(self, number: int) -> Pending:
        """Pack this rank's elements of a round into its part, and start the exchange."""
        exchange, memory = self._exchange, self._part(self._own)
        stages = sorted({item.tensor.stage for item, _, _ in exchange.in_round(number)})
        if self._several and len(stages) > 1:
            memory.zero_()
        self._pack_own(number)
        if not self._several:
            return [self._group.all_gather(self._whole())]
        # Stages share a round only where one ends and the next begins. Each adds zeros to the
        # other's bytes, so one sum does what several broadcasts would.
        return [self._pp.broadcast(memory, stages[0]) if len(stages) == 1 else self._pp.sum(memory)]

    def complete(self, number: int, under_way: Pending) -> None:
        """Wait for the exchange; with several stages, the ranks of `group` exchange here."""
        _wait(under_way)
        if self._several and self._exchange.shards > 1:
            self._group.all_gather(self._whole()).wait()

    def unpack(self, item: Item, begin: int, end: int, target: BufferSlice) -> None:
        """Copy elements `begin` to `end` of every rank's run from the buffer to `target`."""
        typed, start = target.elements(item.tensor.dtype)
        for rank in range(self._exchange.shards):
            parts = self._share(item, rank)
            sent = self._sent(item, begin, end, rank)
            for place, hf, _ in overlaps(parts, begin, end):
                into = typed.as_strided(hf.size, hf.stride, start + hf.offset)
                into.copy_(_piece(sent, place, hf))

    def _pack_own(self, number: int) -> None:
        if self._kept is not None:
            begin, pieces = self._kept[number]
            for piece, own in zip(pieces, _cut(self._part(self._own)[begin:], pieces), strict=True):
                own.copy_(piece)
            return
        for item, begin, end in self._exchange.in_round(number):
            if self._has(item):
                self._pack(item, begin, end)

    @property
    def _owner(self) -> int:
        """Which of the owners of experts this rank is."""
        return 0

    def _has(self, item: Item) -> bool:
        return not self._several or item.tensor.stage == self._pp.rank

    def _pack(self, item: Item, begin: int, end: int) -> None:
        entry = item.entries[self._own // self._exchange.split]
        sent = self._sent(item, begin, end, self._own)
        for place, hf, own in overlaps(self._share(item, self._own), begin, end):
            _piece(sent, place, hf).copy_(self._sources.view(entry, own))

    def _share(self, item: Item, rank: int) -> tuple[Segment, ...]:
        """A rank's share of the item. The ranks are numbered as `Topology` does: shards fastest,
        then the owners of experts.
        """
        owner, shard = divmod(rank, self._exchange.split)
        row, architecture = item.entries[owner].row, self._sources.architecture
        return segments(row, architecture, item.part, shard, self._exchange.split)

    def _sent(self, item: Item, begin: int, end: int, rank: int) -> Tensor:
        """The buffer's elements for that range of the item's run in one rank's stream."""
        size, chunk = item.sent_dtype.itemsize, self._exchange.chunk
        in_stream = item.start + begin * size
        first = (rank * chunk + in_stream % chunk) // size
        return self._buffer.typed(item.sent_dtype)[first : first + end - begin]

    def _whole(self) -> Tensor:
        return self._buffer.memory[: self._exchange.shards * self._exchange.chunk]

    def _part(self, rank: int) -> Tensor:
        return self._whole().view(self._exchange.shards, -1)[rank]


class OwnerRounds(Rounds):
    """The rounds of items that one expert-parallel rank of `group` has.

    The owner's pipeline group passes a part on first, and then the owner broadcasts it: the bytes
    that arrive at a rank are those of an all-gather.
    """

    def start(self, number: int) -> Pending:
        self._pack_own(number)
        parts = self._exchange.parts(number)
        if not self._several:
            return self._spread(parts)
        memory = self._part(self._own)
        return [
            self._pp.broadcast(memory[part.begin : part.end], part.stage)
            for part in parts
            if part.owner == self._owner
        ]

    def complete(self, number: int, under_way: Pending) -> None:
        _wait(under_way)
        if self._several:
            _wait(self._spread(self._exchange.parts(number)))

    @property
    def _owner(self) -> int:
        return self._group.rank // self._exchange.shards

    def _has(self, item: Item) -> bool:
        return item.owner == self._owner and super()._has(item)

    def _spread(self, parts: Iterable[Part]) -> Pending:
        shards = self._exchange.shards
        return [
            self._group.broadcast(
                self._part(rank)[part.begin : part.end], part.owner * shards + rank
            )
            for part in parts
            for rank in range(shards)
        ]


class ByteRounds(Rounds):
    """The rounds of items of bytes, `[ranks, bytes]`, which are not of a parameter."""

    def _share(self, item: Item, rank: int) -> tuple[Segment, ...]:
        count = item.elements
        return (Segment(*2 * (Region((count,), (1,), rank * count),), 0, count),)


def make_rounds(
    exchange: Exchange,
    sources: Sources,
    group: BoundedProcessGroup,
    pp: BoundedProcessGroup,
    kept: Kept | None = None,
) -> Rounds:
    """The rounds of an exchange over the ranks that hold its items between them."""
    kind = OwnerRounds if exchange.owners > 1 else Rounds
    if any(not item.entries for item in exchange.items):
        kind = ByteRounds
    return kind(exchange, sources, group, pp, kept)


def _cut(memory: Tensor, pieces: PoolSlice) -> Iterator[Tensor]:
    """Consecutive parts of the memory, as long as the pieces."""
    start = 0
    for piece in pieces:
        yield memory[start : start + piece.numel()]
        start += piece.numel()


def _wait(under_way: Pending) -> None:
    for each in under_way:
        each.wait()


def _piece(sent: Tensor, place: int, box: Region) -> Tensor:
    return sent[place : place + math.prod(box.size)].view(box.size)
