"""The local shards of a training checkpoint on this rank, which part of them it writes, and which
boxes of the unsharded parameters ranges of them are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from torch import Tensor

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.formats.dist_keys import OPTIMIZER_STATE, written
from megatron_policy.converters.formats.dist_writing import CHUNK_BYTES
from megatron_policy.converters.rows.blocks import Row, Shape, of_expert
from megatron_policy.converters.rows.regions import boxes, dot, strides
from megatron_policy.converters.rows.shards import copies_of, spans, unpadded_shape
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


class Slice(NamedTuple):
    """A box of the unsharded parameter whose elements are contiguous in the flat shard."""

    own: int
    """The first element's index in the flat shard."""
    origin: Shape
    sizes: Shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


_Cuts = list[tuple[int, int, int]]
"""Along a dimension: first and last (exclusive) index in the shard, and how far to move them."""


def cut_slices(
    row: Row, architecture: Architecture, rank: int, size: int, first: int, last: int
) -> Iterator[Slice]:
    """Elements `first` to `last` (exclusive) of the flat shard, without padding, in order."""
    if row.ranges is not None and size > 1:
        start, _ = row.ranges[rank]
        for piece in cut_slices(row, architecture, 0, 1, start + first, start + last):
            yield piece._replace(own=piece.own - start)
        return
    shape = row.local_shape(architecture, size)
    steps, held = strides(shape), spans(row, architecture, rank, size)
    for box in boxes(shape, first, last):
        cuts = [
            [
                (max(low, span.own), min(high, span.own + span.length), span.whole - span.own)
                for span in along
                if low < span.own + span.length and span.own < high
            ]
            for (low, high), along in zip(box, held, strict=True)
        ]
        for single in _outer(shape, cuts):
            for cut in product(*single):
                origin = [low for low, _, _ in cut]
                whole = tuple(low + move for low, _, move in cut)
                yield Slice(dot(origin, steps), whole, tuple(high - low for low, high, _ in cut))


def _outer(shape: Shape, cuts: list[_Cuts]) -> Iterator[list[_Cuts]]:
    """Split the cuts into single indices along every dimension outside the innermost one that is
    cut, so that each result is contiguous in the shard.
    """
    inside = [dim for dim, of in enumerate(cuts) if [(a, b) for a, b, _ in of] != [(0, shape[dim])]]
    if not inside:
        yield cuts
        return
    singles = [
        [(at, at + 1, move) for low, high, move in of for at in range(low, high)]
        for of in cuts[: inside[-1]]
    ]
    for index in product(*singles):
        yield [*([one] for one in index), *cuts[inside[-1] :]]


def cut_pieces(piece: Slice, most: int) -> Iterator[Slice]:
    """Split the slice into pieces of at most `most` elements along whole rows."""
    dim = next((n for n, size in enumerate(piece.sizes) if size > 1), None)
    if piece.elements <= most or dim is None:
        yield piece
        return
    inner = math.prod(piece.sizes[dim + 1 :])
    step = max(1, most // inner)
    for row in range(0, piece.sizes[dim], step):
        count = min(step, piece.sizes[dim] - row)
        part = Slice(
            piece.own + row * inner,
            (*piece.origin[:dim], piece.origin[dim] + row, *piece.origin[dim + 1 :]),
            (*piece.sizes[:dim], count, *piece.sizes[dim + 1 :]),
        )
        yield from cut_pieces(part, most) if part.elements > most else (part,)


def clip_rows(piece: Slice, first: int, shape: Shape) -> Iterator[Slice]:
    """What of the slice is in the part of that shape which begins with row `first` of the
    parameter, as a slice of the part; nothing, or one.
    """
    if not shape:
        yield piece
        return
    (top, *rest), inner = piece.origin, piece.sizes[1:]
    low, high = max(top, first), min(top + piece.sizes[0], first + shape[0])
    if low < high:
        own = piece.own + (low - top) * math.prod(inner)
        yield Slice(own, (low - first, *rest), (high - low, *inner))


def divide(lengths: Iterable[tuple[int, int]], index: int, count: int) -> list[tuple[int, int]]:
    """Divide tensors that `count` ranks all hold, given as (elements, bytes of each): for each
    tensor the elements, first to last (exclusive), of rank `index`. Ranks get equal runs of bytes
    in order.
    """
    held = list(lengths)
    ends = list(accumulate(elements * size for elements, size in held))
    total = ends[-1] if ends else 0
    low, high = total * index // count, total * (index + 1) // count
    return [
        (
            min(elements, max(0, -(-(low - end + elements * size) // size))),
            min(elements, max(0, -(-(high - end + elements * size) // size))),
        )
        for (elements, size), end in zip(held, ends, strict=True)
    ]
