"""The local shards of a training checkpoint on this rank, and which part of them it writes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_policy.checkpoint.slices import (
    Slice,
    clip_rows,
    cut_pieces,
    cut_slices,
    divide,
)
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.formats.dist_keys import OPTIMIZER_STATE, written
from megatron_policy.converters.formats.dist_writing import CHUNK_BYTES
from megatron_policy.converters.rows.blocks import Row, Shape, of_expert
from megatron_policy.converters.rows.shards import copies_of, unpadded_shape
from megatron_policy.converters.table import Entry
from megatron_policy.interfaces.engine import OptimizerState
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import Held

WEIGHTS = ""
"""The kind of the parameters themselves; other kinds are optimizer state."""


@dataclass(frozen=True)
class LocalShard:
    """Elements `first` to `last` (exclusive) of a flat parameter, or of its optimizer state."""

    entry: Entry
    kind: str
    tensor: Tensor
    """Flat, `[last - first]`, and live: writing to it changes the policy."""
    first: int
    last: int
    replica: tuple[int, int]
    """(index, count) of this rank among the ranks that hold the same elements."""


@dataclass(frozen=True)
class WriteItem:
    """One record to write: a box of a checkpoint tensor, and the memory that holds it."""

    key: str
    shape: Shape
    origin: Shape
    sizes: Shape
    tensor: Tensor
    """Flat, with as many elements as the box of `sizes`."""


def list_weights(held: Held, architecture: Architecture, place: Placement) -> list[LocalShard]:
    """This rank's parameters and persistent buffers."""
    return [
        LocalShard(
            entry,
            WEIGHTS,
            parameter.detach().view(-1),
            0,
            parameter.numel(),
            _replica(entry.row, architecture, place, distributed=False),
        )
        for entry, parameter in held
    ]


def list_states(
    held: Held, architecture: Architecture, place: Placement, training: OptimizerState
) -> list[LocalShard]:
    """This rank's part of the optimizer's state, if there is any yet."""
    entries = {id(parameter): entry for entry, parameter in held}
    found = []
    for state in training.tensors():
        entry = entries[id(state.parameter)]
        replica = _replica(entry.row, architecture, place, training.distributed)
        found.append(LocalShard(entry, state.kind, state.tensor, state.first, state.last, replica))
    return found


def plan_items(
    shards: Iterable[LocalShard], architecture: Architecture, place: Placement
) -> list[WriteItem]:
    """What this rank writes of its local shards; together, all ranks write each element once.

    A copy of another stage's parameter is never written; norms that layer specs name in two ways
    are written under both names.
    """
    return [
        item
        for shard, first, last in _own_share([h for h in shards if h.entry.row.owns])
        if first < last
        for item in _items(shard, first, last, architecture, place)
    ]


def locate(
    shard: LocalShard, architecture: Architecture, place: Placement
) -> Iterator[tuple[Slice, Tensor]]:
    """Yield the local shard box by box: its place in the unsharded parameter, and its memory."""
    row, at = shard.entry.row, place.shard_of(shard.entry.row)
    for piece in cut_slices(row, architecture, *at, shard.first, shard.last):
        yield piece, _memory(shard, piece)


def state_prefix(kind: str) -> str:
    """The prefix that turns a parameter's key into the key of that kind of state of it, as in
    Megatron-Core's reshardable format.
    """
    return "" if kind == WEIGHTS else f"{OPTIMIZER_STATE}{kind}."


def _replica(
    row: Row, architecture: Architecture, place: Placement, distributed: bool
) -> tuple[int, int]:
    """(index, count) of this rank among those that share the writing of a parameter, or of a state
    that a distributed optimizer splits over the ranks which hold the same shard.
    """
    index, count = (0, 1) if distributed else place.copy_of(row)
    shard = place.shard_of(row)
    number, copies = copies_of(row, architecture, shard.size)[shard.rank]
    return index * copies + number, count * copies


def _own_share(shards: Sequence[LocalShard]) -> Iterator[tuple[LocalShard, int, int]]:
    """Each local shard with the range of its parameter's elements that this rank writes.

    The ranks that hold copies share them out as one, so all have to hold copies of the same
    parameters: as many copies of an expert's parameter may be on other ranks than those of others.
    """
    together: defaultdict[tuple[int, int, bool], list[LocalShard]] = defaultdict(list)
    for shard in shards:
        together[*shard.replica, of_expert(shard.entry.row.megatron)].append(shard)
    for (index, count, _), group in together.items():
        lengths = [(h.last - h.first, h.tensor.element_size()) for h in group]
        for shard, (a, b) in zip(group, divide(lengths, index, count), strict=True):
            yield shard, shard.first + a, shard.first + b


def _items(
    shard: LocalShard, first: int, last: int, architecture: Architecture, place: Placement
) -> Iterator[WriteItem]:
    row, at = shard.entry.row, place.shard_of(shard.entry.row)
    places = written(shard.entry.saved, architecture)
    whole = unpadded_shape(row, architecture)
    most = CHUNK_BYTES // shard.tensor.element_size()
    for piece in cut_slices(row, architecture, *at, first, last):
        for part in cut_pieces(piece, most):
            # If layer specs name a norm in two ways, its states are read under either name.
            for where in places if shard.kind == WEIGHTS else places[:1]:
                for key, begin, shape in where.divide(whole):
                    for own in clip_rows(part, begin, shape):
                        yield WriteItem(
                            f"{state_prefix(shard.kind)}{key}",
                            (*where.axes, *shape),
                            (*where.lead, *own.origin),
                            (*(1 for _ in where.lead), *own.sizes),
                            _memory(shard, own),
                        )


def _memory(shard: LocalShard, piece: Slice) -> Tensor:
    start = piece.own - shard.first
    return shard.tensor[start : start + math.prod(piece.sizes)]
