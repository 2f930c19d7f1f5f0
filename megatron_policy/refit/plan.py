"""What a refit moves, from which rank, in which round; `planning.py` makes the plan.

Pure: a plan is the same on every rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_policy.converters.table import Entry
from megatron_policy.refit.buffers import align

STREAM_ALIGNMENT = 16
"""Bytes; a multiple of every dtype's size."""
_ROUNDING = 1.02
"""How far a round may exceed the bucket, so that rounding shares up costs no extra round."""


@dataclass(frozen=True)
class RefitTensor:
    """One HF tensor and the pipeline stage that holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int = 0

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Item:
    """One Megatron parameter's part of one HF tensor: a run in every shard's stream.

    The run begins at byte `start` of the streams and has `elements` elements of `sent_dtype`: as
    many as the rank with the largest share has. `owner` is the expert-parallel rank that has them,
    0 if all have. `first` and `last` say whether it contains the tensor's first elements, and
    whether it completes the tensor. Of a tensor that holds all experts of a layer, an item has one
    expert of each expert-parallel rank: `entries` by that rank.
    """

    tensor: RefitTensor
    entries: tuple[Entry, ...]
    part: int
    sent_dtype: torch.dtype
    start: int
    elements: int
    first: bool
    last: bool
    owner: int = 0

    @property
    def entry(self) -> Entry:
        """The parameter, or the first of those whose tensor it is."""
        return self.entries[0]

    @property
    def end(self) -> int:
        """The byte after the run."""
        return self.start + self.elements * self.sent_dtype.itemsize


class Part(NamedTuple):
    """A range of bytes of a round, in every stream, that come from the same ranks."""

    stage: int
    owner: int
    begin: int
    end: int


@dataclass(frozen=True)
class Pack:
    """Whole tensors that travel in one buffer, each at its offset in bytes."""

    tensors: tuple[RefitTensor, ...]
    offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Exchange:
    """Items that are exchanged over the same group of ranks, in the order in which they are sent.

    Each of `shards` ranks has a stream with its share of every item. `sharing` expert-parallel
    ranks each have another part of every item; otherwise `owners` is the number of those that have
    different items. `stages` are the pipeline stages that take part. Each round exchanges the next
    `chunk` bytes of all streams: over the stages, and then over the shards and from their owner to
    all. `in_rounds` is whether a rank that holds everything makes rounds of its stream too.
    """

    items: tuple[Item, ...]
    shards: int
    stages: tuple[int, ...]
    bucket_bytes: int
    owners: int = 1
    sharing: int = 1
    of_experts: bool = False
    in_rounds: bool = False

    @property
    def split(self) -> int:
        """Over how many tensor-parallel ranks a parameter is split."""
        return self.shards // self.sharing

    @cached_property
    def tensors(self) -> tuple[RefitTensor, ...]:
        """Each HF tensor once, in order."""
        return tuple(item.tensor for item in self.items if item.last)

    @property
    def gathers(self) -> bool:
        """Whether ranks have to exchange anything; a rank that holds everything just copies it."""
        return self.shards > 1 or self.owners > 1 or len(self.stages) > 1

    @property
    def rounds(self) -> int:
        """Exchanges over each kind of group: stream bytes divided by bucket bytes, rounded up."""
        most = int(self.bucket_bytes * _ROUNDING) // self.shards
        most -= most % STREAM_ALIGNMENT
        return -(-self._stream_bytes // most) if self.gathers or self.in_rounds else 0

    @cached_property
    def chunk(self) -> int:
        """Bytes of each stream per round; `shards` times this is at most a bucket plus 2 %."""
        return align(-(-self._stream_bytes // max(1, self.rounds)), STREAM_ALIGNMENT)

    @property
    def round_bytes(self) -> int:
        """Bytes of the buffer that rounds use; 0 if there are none."""
        return self.shards * self.chunk if self.rounds else 0

    @property
    def collectives(self) -> int:
        """Collective calls in one refit, not counting the closing agreement; of experts' owners,
        which make the most.
        """
        if self.owners == 1:
            return self.rounds * ((self.shards > 1) + (len(self.stages) > 1))
        parts = sum(len(self.parts(number)) for number in range(self.rounds))
        return parts * (self.shards + (len(self.stages) > 1))

    def in_round(self, number: int) -> Iterator[tuple[Item, int, int]]:
        """Items with elements in that round, and their element range (first, end)."""
        begin = number * self.chunk
        for index in range(*self._round_bounds[number]):
            item = self.items[index]
            size = item.sent_dtype.itemsize
            first = max(begin - item.start, 0) // size
            end = min(begin + self.chunk - item.start, item.end - item.start) // size
            yield item, first, end

    def parts(self, number: int) -> list[Part]:
        """The round as ranges that come from one stage and owner each; they cover all its bytes."""
        found: list[Part] = []
        for item, _, _ in self.in_round(number):
            source = (item.tensor.stage, item.owner)
            if not found or (found[-1].stage, found[-1].owner) != source:
                begin = max(item.start - number * self.chunk, 0)
                if found:
                    found[-1] = found[-1]._replace(end=begin)
                found.append(Part(*source, begin, self.chunk))
        return found

    def own_range(self, number: int, stage: int, owner: int) -> tuple[int, int]:
        """The bytes (begin, end) of a round's chunk that ranks of that stage, with the experts of
        that owner, have something for; they are together, as the items are in this order.
        """
        own = [
            (item, first, end)
            for item, first, end in self.in_round(number)
            if item.tensor.stage == stage and (self.owners == 1 or item.owner == owner)
        ]
        if not own:
            return 0, 0
        (low, first, _), (high, _, end) = own[0], own[-1]
        begin = low.start + first * low.sent_dtype.itemsize - number * self.chunk
        return begin, high.start + end * high.sent_dtype.itemsize - number * self.chunk

    def stream_bytes(self, stage: int, owner: int) -> int:
        """Bytes of the streams of those ranks."""
        ranges = (self.own_range(number, stage, owner) for number in range(self.rounds))
        return sum(end - begin for begin, end in ranges)

    @cached_property
    def _round_bounds(self) -> tuple[tuple[int, int], ...]:
        """Indices (first, end) of each round's items."""
        bounds, low, count = [], 0, len(self.items)
        for number in range(self.rounds):
            begin, end = number * self.chunk, (number + 1) * self.chunk
            while low < count and self.items[low].end <= begin:
                low += 1
            high = low
            while high < count and self.items[high].start < end:
                high += 1
            bounds.append((low, high))
        return tuple(bounds)

    @property
    def _stream_bytes(self) -> int:
        return self.items[-1].end if self.items else 0


@dataclass(frozen=True)
class RefitPlan:
    """The tensors of one refit in the order in which they are sent: those that all ranks of a
    tensor-parallel group hold between them, then those of experts that other groups hold.
    """

    exchanges: tuple[Exchange, ...]
    stages: tuple[int, ...]
    bucket_bytes: int

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All items, in order."""
        return tuple(item for exchange in self.exchanges for item in exchange.items)

    @cached_property
    def tensors(self) -> tuple[RefitTensor, ...]:
        """Each HF tensor once, in order."""
        return tuple(tensor for exchange in self.exchanges for tensor in exchange.tensors)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def in_rounds(self) -> RefitPlan:
        """The same, with rounds also where nothing is exchanged: for weights that are kept as the
        streams of their ranks.
        """
        return replace(self, exchanges=tuple(replace(e, in_rounds=True) for e in self.exchanges))

    @cached_property
    def snapshot_bytes(self) -> int:
        """Host memory of a detached refit: the largest stream of any rank."""
        exchanges = self.in_rounds.exchanges
        owners = max((exchange.owners for exchange in exchanges), default=1)
        return max(
            sum(exchange.stream_bytes(stage, owner) for exchange in exchanges)
            for stage in self.stages
            for owner in range(owners)
        )

    @cached_property
    def kept_bytes(self) -> int:
        """Host memory of the copy with which weights are compared to send what has changed: at most
        that of any rank.
        """
        shares: Counter[tuple[int, int]] = Counter()
        for exchange in self.exchanges:
            for item in exchange.items:
                nbytes = align(item.elements * item.tensor.dtype.itemsize, STREAM_ALIGNMENT)
                owner = item.owner if exchange.owners > 1 else -1
                shares[item.tensor.stage, owner] += nbytes
        experts = dict.fromkeys(self.stages, 0)
        for (stage, owner), nbytes in shares.items():
            if owner >= 0:
                experts[stage] = max(experts[stage], nbytes)
        return max(shares[stage, -1] + experts[stage] for stage in self.stages)

    @property
    def gathers(self) -> bool:
        """Whether ranks have to exchange anything."""
        return any(exchange.gathers for exchange in self.exchanges)

    @property
    def rounds(self) -> int:
        """Rounds of all exchanges."""
        return sum(exchange.rounds for exchange in self.exchanges)

    @property
    def round_bytes(self) -> int:
        """Bytes of the largest exchange's buffer: at most a bucket plus 2 %."""
        return max((exchange.round_bytes for exchange in self.exchanges), default=0)

    @property
    def collectives(self) -> int:
        """Collective calls of one rank in one refit; see `Exchange.collectives`."""
        return sum(exchange.collectives for exchange in self.exchanges)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest tensor."""
        return max((tensor.nbytes for tensor in self.tensors), default=0)

    def info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor by name, in the order in which they are sent."""
        return {tensor.name: (tensor.shape, tensor.dtype) for tensor in self.tensors}


def pack_tensors(tensors: Sequence[RefitTensor], capacity: int) -> tuple[Pack, ...]:
    """Group tensors in order into packs of at most `capacity` bytes; a larger one gets its own."""
    groups: list[tuple[list[RefitTensor], list[int]]] = []  # tensors, and ends of each
    for tensor in tensors:
        space = align(tensor.nbytes)
        if not groups or groups[-1][1][-1] + space > capacity:
            groups.append(([], [0]))
        held, ends = groups[-1]
        held.append(tensor)
        ends.append(ends[-1] + space)
    return tuple(Pack(tuple(held), tuple(ends[:-1]), ends[-1]) for held, ends in groups)
