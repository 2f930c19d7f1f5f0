"""Plans what a refit moves, from which rank, in which round, before any byte moves.

Pure: the plan depends on the table, the layout and dtypes only, and is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_policy.config.numbers import DEFAULT_BUCKET_BYTES
from megatron_policy.converters.table import EMBEDDING, HEAD, WEIGHT_DTYPES, Entry, Table
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.parallel.topology import LayerSplit
from megatron_policy.refit.buffers import aligned
from megatron_policy.weights.geometry import largest_share

SMALLEST_BUCKET_BYTES = 4096
_STREAM_ALIGNMENT = 16  # bytes; a multiple of every dtype's size
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
    """One Megatron parameter's part of one HF tensor: a run in every tensor-parallel rank's stream.

    The run begins at byte `start` of the streams and has `elements` elements of `sent_dtype`: as
    many as the rank with the largest share has. `first` and `last` say whether it contains the
    tensor's first elements, and whether it completes the tensor.
    """

    tensor: RefitTensor
    entry: Entry
    part: int
    sent_dtype: torch.dtype
    start: int
    elements: int
    first: bool
    last: bool

    @property
    def end(self) -> int:
        """The byte after the run."""
        return self.start + self.elements * self.sent_dtype.itemsize


@dataclass(frozen=True)
class Pack:
    """Whole tensors that travel in one buffer, each at its offset in bytes."""

    tensors: tuple[RefitTensor, ...]
    offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class RefitPlan:
    """The tensors of one refit in the order in which they are sent, stage after stage.

    Each of `shards` tensor-parallel ranks has a stream with its share of every item; `stages` are
    the pipeline stages that take part. Each round exchanges the next `chunk` bytes of all streams,
    over the stages and then over the tensor-parallel ranks.
    """

    items: tuple[Item, ...]
    shards: int
    stages: tuple[int, ...]
    bucket_bytes: int

    @cached_property
    def tensors(self) -> tuple[RefitTensor, ...]:
        """Each HF tensor once, in order."""
        return tuple(item.tensor for item in self.items if item.last)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def gathers(self) -> bool:
        """Whether ranks have to exchange anything; a rank that holds everything just copies it."""
        return self.shards > 1 or len(self.stages) > 1

    @property
    def rounds(self) -> int:
        """Exchanges over each kind of group: stream bytes divided by bucket bytes, rounded up."""
        most = int(self.bucket_bytes * _ROUNDING) // self.shards
        most -= most % _STREAM_ALIGNMENT
        return -(-self._stream_bytes // most) if self.gathers else 0

    @cached_property
    def chunk(self) -> int:
        """Bytes of each stream per round; `shards` times this is at most a bucket plus 2 %."""
        return aligned(-(-self._stream_bytes // max(1, self.rounds)), _STREAM_ALIGNMENT)

    @property
    def collectives(self) -> int:
        """Collective calls of one rank in one refit, not counting the closing agreement."""
        return self.rounds * ((self.shards > 1) + (len(self.stages) > 1))

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest tensor."""
        return max((tensor.nbytes for tensor in self.tensors), default=0)

    def in_round(self, number: int) -> Iterator[tuple[Item, int, int]]:
        """Items with elements in that round, and their element range (first, end)."""
        begin = number * self.chunk
        for index in range(*self._round_bounds[number]):
            item = self.items[index]
            size = item.sent_dtype.itemsize
            first = max(begin - item.start, 0) // size
            end = min(begin + self.chunk - item.start, item.end - item.start) // size
            yield item, first, end

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

    def info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor by name, in the order in which they are sent."""
        return {tensor.name: (tensor.shape, tensor.dtype) for tensor in self.tensors}


@dataclass(frozen=True)
class RefitModel:
    """The input of a plan.

    `dtypes` are those of the HF tensors in the checkpoint, `precision` is the dtype of the
    parameters in training.
    """

    table: Table
    split: LayerSplit
    dtypes: Mapping[str, torch.dtype]
    precision: torch.dtype
    shards: int


def plan_refit(
    model: RefitModel,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    stage: int | None = None,
    names: Collection[str] | None = None,
) -> RefitPlan:
    """The plan for all HF tensors, or those of one pipeline `stage`, or those of `names`.

    Tensors keep the checkpoint's dtype unless `dtype` names another; those that keep their own
    dtype in training keep it here too. ConfigError if the bucket is too small, RefitError for a
    name that the model does not have.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        legal = ", ".join(str(kind).removeprefix("torch.") for kind in WEIGHT_DTYPES)
        raise ConfigError(f"weights cannot be handed over as {dtype}; legal: torch's {legal}")
    least = SMALLEST_BUCKET_BYTES * model.shards
    if bucket_bytes < least:
        raise ConfigError(
            f"a refit bucket of {bucket_bytes} bytes is too small: give {least} or more "
            f"({SMALLEST_BUCKET_BYTES} for each tensor-parallel rank)"
        )
    owned = sorted(
        ((stage_of(entry, model.split), entry) for entry in model.table.exported()),
        key=lambda pair: pair[0],
    )
    if names is not None:
        _refuse_unknown(names, model.table)
    wanted = None if names is None else frozenset(names)
    chosen = [
        (at, entry, part)
        for at, entry in owned
        if stage is None or at == stage
        for part, name in enumerate(entry.hf)
        if wanted is None or name in wanted
    ]
    stages = range(len(model.split.stages)) if stage is None else (stage,)
    return RefitPlan(tuple(_items(chosen, model, dtype)), model.shards, tuple(stages), bucket_bytes)


def packed(tensors: Sequence[RefitTensor], capacity: int) -> tuple[Pack, ...]:
    """Group tensors in order into packs of at most `capacity` bytes; a larger one gets its own."""
    packs: list[Pack] = []
    group: list[tuple[RefitTensor, int]] = []
    used = 0
    for tensor in tensors:
        space = aligned(tensor.nbytes)
        if group and used + space > capacity:
            packs.append(_pack(group, used))
            group, used = [], 0
        group.append((tensor, used))
        used += space
    if group:
        packs.append(_pack(group, used))
    return tuple(packs)


def stage_of(entry: Entry, split: LayerSplit) -> int:
    """The pipeline stage that holds the entry's parameter."""
    if entry.where == EMBEDDING:
        return 0
    if entry.where == HEAD:
        return len(split.stages) - 1
    assert entry.layer is not None
    return split.owner(entry.layer)[0]


def _pack(group: Sequence[tuple[RefitTensor, int]], used: int) -> Pack:
    tensors, offsets = zip(*group, strict=True)
    return Pack(tensors, offsets, used)


def _items(
    chosen: Sequence[tuple[int, Entry, int]], model: RefitModel, dtype: torch.dtype | None
) -> Iterator[Item]:
    architecture = model.table.architecture
    shapes = model.table.hf_shapes()
    start, tensor = 0, RefitTensor("", (), model.precision, 0)
    for index, (stage, entry, part) in enumerate(chosen):
        name, row = entry.hf[part], entry.row
        first = tensor.name != name
        if first:
            target = model.dtypes[name] if dtype is None or row.keeps_dtype else dtype
            tensor = RefitTensor(name, shapes[name], target, stage)
        held = torch.float32 if row.keeps_dtype else model.precision
        item = Item(
            tensor=tensor,
            entry=entry,
            part=part,
            # The narrower of the two: casting gives the same on either side of the exchange.
            sent_dtype=tensor.dtype if tensor.dtype.itemsize < held.itemsize else held,
            start=start,
            elements=largest_share(row, architecture, part, model.shards),
            first=first,
            last=index + 1 == len(chosen) or _name(chosen[index + 1]) != name,
        )
        start = aligned(item.end, _STREAM_ALIGNMENT)
        yield item


def _name(chosen: tuple[int, Entry, int]) -> str:
    return chosen[1].hf[chosen[2]]


def _refuse_unknown(names: Collection[str], table: Table) -> None:
    known = {name for entry in table.exported() for name in entry.hf}
    if unknown := sorted(set(names) - known):
        raise RefitError(
            f"this {table.family} model has no HF tensor {', '.join(unknown[:8])}; "
            "ask for names that prepare_refit_info lists"
        )
