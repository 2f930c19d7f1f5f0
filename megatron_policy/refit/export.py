"""Streams a policy's weights as whole Hugging Face tensors, following a refit plan.

Tensor-parallel shards and pipeline stages are exchanged in rounds through one buffer of at most one
bucket; the next round runs while the last tensors are consumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove

import torch
from torch import Tensor

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.regions import Region, Run, runs
from megatron_policy.converters.table import Entry
from megatron_policy.coordination.process_group import BoundedProcessGroup, PendingCollective
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.plan import Item, RefitPlan, RefitTensor
from megatron_policy.weights.geometry import overlaps, segments

Place = Callable[[RefitTensor], BufferSlice | None]
"""Where to write a tensor's elements, if anywhere; may wait for memory to become free."""

Moves = tuple[Tensor, Sequence[tuple[int, int, int]]]
"""A parameter and its copied runs: (offset in the HF tensor, offset in it, length), in bytes."""

Copies = tuple[Item, Moves | None, Sequence[tuple[Region, Tensor]]]
"""An item and how to copy it: as raw bytes, or into regions of the HF tensor, each from a view."""

_LONGEST_MOVE = 1 << 18  # bytes: torch copies longer runs faster, with all its threads
_MOST_MOVES = 4  # per tensor: beyond that, one call for the whole region is faster

Filled = Iterator[tuple[RefitTensor, BufferSlice | None]]


class Sources:
    """This rank's parameters, and the views of them that each plan needs."""

    def __init__(self, held: Sequence[tuple[Entry, Tensor]], architecture: Architecture) -> None:
        self.architecture = architecture
        self._held = {entry.megatron: parameter for entry, parameter in held}
        self._views: dict[tuple[str, Region], Tensor] = {}
        self._copies: dict[int, tuple[RefitPlan, list[Copies]]] = {}

    @property
    def probe(self) -> Tensor:
        """A parameter; all are on the same device."""
        return next(iter(self._held.values()))

    def view(self, entry: Entry, region: Region) -> Tensor:
        """A view of those elements of the live parameter; cached, as parameters never move."""
        key = (entry.megatron, region)
        if key not in self._views:
            flat = self._held[entry.megatron].detach()
            self._views[key] = flat.as_strided(
                region.size, region.stride, flat.storage_offset() + region.offset
            )
        return self._views[key]

    def copies(self, plan: RefitPlan) -> list[Copies]:
        """The copies made by a rank that holds the whole plan; computed on first use."""
        if id(plan) not in self._copies:
            found = [self._copies_of(item, plan.shards) for item in plan.items]
            self._copies[id(plan)] = (plan, found)  # the plan is kept so that its id is not reused
        return self._copies[id(plan)][1]

    def _copies_of(self, item: Item, shards: int) -> Copies:
        parts = segments(item.entry.row, self.architecture, item.part, 0, shards)
        parameter = self._held[item.entry.megatron].detach()
        found = [run for part in parts for run in runs(part.hf, part.own)]
        if _are_moved(found, item, parameter):
            size = parameter.dtype.itemsize
            return (
                item,
                (parameter, [(r.hf * size, r.own * size, r.length * size) for r in found]),
                (),
            )
        if len(found) == len(parts):  # one run each
            regions = [(_line(run.hf, run.length), _line(run.own, run.length)) for run in found]
        else:
            regions = [(part.hf, part.own) for part in parts]
        return item, None, [(hf, self.view(item.entry, own)) for hf, own in regions]

    def forget(self) -> None:
        """Drop everything cached for plans."""
        self._views.clear()
        self._copies.clear()


def stream_alone(plan: RefitPlan, sources: Sources, place: Place) -> Filled:
    """For a rank that holds the whole plan: copy straight from the parameters."""
    target: BufferSlice | None = None
    for item, moves, regions in sources.copies(plan):
        if item.first:
            target = place(item.tensor)
        if target is not None and moves is not None:
            parameter, runs_of = moves
            assert target.offset + item.tensor.nbytes <= target.buffer.nbytes, item.tensor
            to = target.buffer.address + target.offset
            source = parameter.data_ptr()
            for at, start, nbytes in runs_of:
                memmove(to + at, source + start, nbytes)
        elif target is not None:
            typed, first = _elements(target, item.tensor)
            for (size, stride, offset), view in regions:
                torch.as_strided(typed, size, stride, first + offset).copy_(view)
        if item.last:
            yield item.tensor, target


def stream_together(
    plan: RefitPlan,
    sources: Sources,
    place: Place,
    tp: BoundedProcessGroup,
    pp: BoundedProcessGroup,
) -> Filled:
    """For ranks that hold the plan's tensors between them; `pp` is used if there are stages."""
    if not plan.rounds:
        return
    rounds = _Rounds(plan, sources, tp, pp)
    under_way = rounds.start(0)
    target: BufferSlice | None = None
    for number in range(plan.rounds):
        rounds.complete(under_way)
        for item, begin, end in plan.in_round(number):
            if begin == 0 and item.first:
                target = place(item.tensor)
            if target is not None:
                rounds.unpack(item, begin, end, target)
            if end == item.elements and item.last:
                yield item.tensor, target
        if number + 1 < plan.rounds:
            under_way = rounds.start(number + 1)


class _Rounds:
    """The exchanges of one refit: a buffer in `shards` parts, each a chunk of a rank's stream."""

    def __init__(
        self, plan: RefitPlan, sources: Sources, tp: BoundedProcessGroup, pp: BoundedProcessGroup
    ) -> None:
        self._plan, self._sources, self._tp, self._pp = plan, sources, tp, pp
        self._buffer = Buffer.on(sources.probe.device, plan.shards * plan.chunk)
        self._own = tp.rank if plan.shards > 1 else 0

    def start(self, number: int) -> PendingCollective | None:
        """Pack this rank's elements of a round into its part, and start the exchange."""
        plan, stage = self._plan, self._pp.rank
        stages = sorted({item.tensor.stage for item, _, _ in plan.in_round(number)})
        memory = self._part(self._own)
        several = len(plan.stages) > 1
        if several and len(stages) > 1:
            memory.zero_()
        for item, begin, end in plan.in_round(number):
            if not several or item.tensor.stage == stage:
                self._pack(item, begin, end)
        if not several:
            return self._tp.all_gather(self._whole())
        # Stages share a round only where one ends and the next begins. Each adds zeros to the
        # other's bytes, so one sum does what several broadcasts would.
        return self._pp.broadcast(memory, stages[0]) if len(stages) == 1 else self._pp.sum(memory)

    def complete(self, under_way: PendingCollective | None) -> None:
        """Wait for the exchange; with several stages, tensor-parallel ranks exchange here."""
        if under_way is not None:
            under_way.wait()
        if len(self._plan.stages) > 1 and self._plan.shards > 1:
            self._tp.all_gather(self._whole()).wait()

    def unpack(self, item: Item, begin: int, end: int, target: BufferSlice) -> None:
        """Copy elements `begin` to `end` of every rank's run from the buffer to `target`."""
        architecture = self._sources.architecture
        for rank in range(self._plan.shards):
            parts = segments(item.entry.row, architecture, item.part, rank, self._plan.shards)
            sent = self._sent(item, begin, end, rank)
            for place, hf, _ in overlaps(parts, begin, end):
                _put(target, item.tensor, hf, _piece(sent, place, hf))

    def _pack(self, item: Item, begin: int, end: int) -> None:
        architecture = self._sources.architecture
        parts = segments(item.entry.row, architecture, item.part, self._own, self._plan.shards)
        sent = self._sent(item, begin, end, self._own)
        for place, hf, own in overlaps(parts, begin, end):
            _piece(sent, place, hf).copy_(self._sources.view(item.entry, own))

    def _sent(self, item: Item, begin: int, end: int, rank: int) -> Tensor:
        """The buffer's elements for that range of the item's run in one rank's stream."""
        size = item.sent_dtype.itemsize
        in_stream = item.start + begin * size
        first = (rank * self._plan.chunk + in_stream % self._plan.chunk) // size
        return self._buffer.typed(item.sent_dtype)[first : first + end - begin]

    def _whole(self) -> Tensor:
        return self._buffer.memory[: self._plan.shards * self._plan.chunk]

    def _part(self, rank: int) -> Tensor:
        return self._whole().view(self._plan.shards, -1)[rank]


def _are_moved(found: Sequence[Run], item: Item, parameter: Tensor) -> bool:
    """Whether to copy raw host memory: a libc call takes a third of the time of a torch call."""
    if parameter.device.type != "cpu" or parameter.dtype != item.tensor.dtype:
        return False
    longest = max((run.length for run in found), default=0) * parameter.dtype.itemsize
    return len(found) <= _MOST_MOVES and longest <= _LONGEST_MOVE


def _line(first: int, length: int) -> Region:
    return Region((length,), (1,), first)


def _put(target: BufferSlice, tensor: RefitTensor, region: Region, source: Tensor) -> None:
    """Copy to that region of the tensor in the buffer slice, casting."""
    typed, first = _elements(target, tensor)
    typed.as_strided(region.size, region.stride, first + region.offset).copy_(source)


def _elements(target: BufferSlice, tensor: RefitTensor) -> tuple[Tensor, int]:
    """The slice's buffer in the tensor's dtype, and where in its storage the tensor begins."""
    typed = target.buffer.typed(tensor.dtype)
    return typed, int(typed.storage_offset()) + target.offset // tensor.dtype.itemsize


def _piece(sent: Tensor, place: int, box: Region) -> Tensor:
    return sent[place : place + math.prod(box.size)].view(box.size)
