"""What ranks have changed as tensors of bytes, which any transport of whole tensors carries.

Of each kind of group and each pipeline stage, the ranks that hold it between them have a stream
each: their messages, each after its length in 8 bytes, and zeros up to the length of the longest. A
tensor `[ranks, bytes]` is the next piece of all these streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_policy.refit.buffers import align
from megatron_policy.refit.plan import STREAM_ALIGNMENT, Exchange, Item, RefitPlan, RefitTensor

_LENGTH_BYTES = 8


class Streams(NamedTuple):
    """Streams over one kind of group of so many ranks: this rank's messages, and how many bytes the
    longest stream of each stage has.
    """

    of_experts: bool
    ranks: int
    messages: Sequence[bytes]
    longest: Sequence[int]

    def plan(self, stages: Sequence[int], bucket_bytes: int) -> Exchange:
        """The exchange of these stages' streams, in tensors of at most a bucket."""
        most = max(1, bucket_bytes // self.ranks // STREAM_ALIGNMENT) * STREAM_ALIGNMENT
        items: list[Item] = []
        for stage in stages:
            for number, begin in enumerate(range(0, self.longest[stage], most)):
                length = min(most, self.longest[stage] - begin)
                name = f"{int(self.of_experts)}.{stage}.{number}"
                tensor = RefitTensor(name, (self.ranks, length), torch.uint8, stage)
                start = align(items[-1].end, STREAM_ALIGNMENT) if items else 0
                items.append(Item(tensor, (), 0, torch.uint8, start, length, True, True))
        return Exchange(
            tuple(items),
            self.ranks,
            tuple(stages),
            bucket_bytes,
            of_experts=self.of_experts,
            in_rounds=True,
        )

    def keep(self, exchange: Exchange, stage: int) -> Sequence[tuple[int, tuple[Tensor, ...]]]:
        """What a rank of that stage has for each round of the exchange; see `Rounds.keep`."""
        own, at = np.zeros(self.longest[stage], np.uint8), 0
        for part in write_stream(self.messages):
            own[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        first = next((item.start for item in exchange.items if item.tensor.stage == stage), 0)
        kept = []
        for number in range(exchange.rounds):
            low, high = exchange.own_range(number, stage, 0)
            begin = number * exchange.chunk - first
            kept.append((low, (torch.from_numpy(own[begin + low : begin + high]),)))
        return kept


def measure_stream(messages: Sequence[bytes]) -> int:
    """Bytes of a stream of these messages, which ends with a length of 0."""
    return sum(map(len, messages)) + _LENGTH_BYTES * (len(messages) + 1)


def write_stream(messages: Sequence[bytes]) -> Iterator[bytes]:
    """A stream of these messages, part after part."""
    for message in messages:
        yield from (len(message).to_bytes(_LENGTH_BYTES, "little"), message)
    yield bytes(_LENGTH_BYTES)


def read_streams(tensors: Mapping[str, Tensor]) -> list[bytes]:
    """The messages of all ranks, each rank's in its order. ValueError for tensors that `Streams`
    does not plan.
    """
    places = {tuple(map(int, name.split("."))): name for name in tensors}
    found: list[bytes] = []
    for _, same in groupby(sorted(places), key=lambda place: place[:2]):
        pieces = [tensors[places[place]] for place in same]
        if {(piece.dim(), len(piece)) for piece in pieces} != {(2, len(pieces[0]))}:
            raise ValueError("its streams are of different numbers of ranks")
        found += _read(torch.cat(pieces, dim=1))
    return found


def _read(streams: Tensor) -> Iterator[bytes]:
    for row in streams:
        content, at = row.numpy().tobytes(), 0
        while length := int.from_bytes(content[at : at + _LENGTH_BYTES], "little"):
            at += _LENGTH_BYTES
            if length > len(content) - at:
                raise ValueError("a message ends after its stream")
            yield content[at : at + length]
            at += length


def plan_streams(kinds: Sequence[Streams], stages: Sequence[int], bucket_bytes: int) -> RefitPlan:
    """The plan of all streams of these stages."""
    exchanges = tuple(kind.plan(stages, bucket_bytes) for kind in kinds)
    return RefitPlan(exchanges, tuple(stages), bucket_bytes)
