"""This rank's parameters as sources of whole Hugging Face tensors, and the stream of those that it
holds whole; `rounds.py` has the stream of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from ctypes import memmove
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.regions import Region, runs
from megatron_policy.converters.table import Entry
from megatron_policy.refit.buffers import BufferSlice
from megatron_policy.refit.plan import Exchange, Item, RefitTensor
from megatron_policy.weights.geometry import segments

if TYPE_CHECKING:
    from megatron_policy.interfaces.engine import Adapters

Place = Callable[[RefitTensor], BufferSlice | None]
"""Where to write a tensor's elements, if anywhere; may wait for memory to become free."""

RawCopies = tuple[Tensor, Sequence[tuple[int, int, int]]]
"""A parameter and its copied runs: (offset in the HF tensor, offset in it, length), in bytes."""

CopyPlan = tuple[Item, RawCopies | None, Sequence[tuple[Region, Tensor | Region]]]
"""An item and how to copy it: as raw bytes, or into regions of the HF tensor, each from a view, or
from a region of a value that is yet to be merged.
"""

_LONGEST_RAW = 1 << 18  # bytes: torch copies longer runs faster, with all its threads
_MOST_RAW = 4  # per tensor: beyond that, one call for the whole region is faster

Filled = Iterator[tuple[RefitTensor, BufferSlice | None]]


class Sources:
    """This rank's parameters, and the views of them that each plan needs."""

    def __init__(
        self,
        held: Sequence[tuple[Entry, Tensor]],
        architecture: Architecture,
        adapters: Adapters | None = None,
    ) -> None:
        """What is sent of a parameter that has an adapter is its merged value."""
        self.architecture = architecture
        self._held = {entry.megatron: parameter for entry, parameter in held}
        self._adapters = adapters
        self._adapted = {e.adapts for e, _ in adapters.held if e.adapts} if adapters else set[str]()
        self._merged: tuple[str, Tensor] | None = None
        if adapters is not None:
            self._held |= {entry.megatron: parameter for entry, parameter in adapters.held}
        self._views: dict[tuple[str, Region], Tensor] = {}
        self._copies: dict[int, tuple[Exchange, list[CopyPlan]]] = {}

    @property
    def probe(self) -> Tensor:
        """A parameter; all are on the same device."""
        return next(iter(self._held.values()))

    def view(self, entry: Entry, region: Region) -> Tensor:
        """A view of those elements of the live parameter; cached, as parameters never move. What is
        merged is computed for the parameter in turn, and not kept beyond `restart`.
        """
        if entry.megatron in self._adapted:
            if self._merged is None or self._merged[0] != entry.megatron:
                self._merged = None  # before the next one takes memory
                assert self._adapters is not None
                value = self._adapters.merged(entry, self._held[entry.megatron].detach())
                assert value is not None, entry.megatron
                self._merged = entry.megatron, value
            return _region(self._merged[1], region)
        key = (entry.megatron, region)
        if key not in self._views:
            self._views[key] = _region(self._held[entry.megatron].detach(), region)
        return self._views[key]

    def apart(self) -> Sources:
        """The same parameters with nothing computed, for another thread, which reads none."""
        other = copy(self)
        other._merged, other._views, other._copies = None, {}, {}
        return other

    def restart(self) -> None:
        """Forget what was merged: the adapters may have changed."""
        self._merged = None

    def copies(self, exchange: Exchange) -> list[CopyPlan]:
        """The copies made by a rank that holds all items whole; computed on first use."""
        if id(exchange) not in self._copies:
            found = [self._plan_copies(item, exchange.shards) for item in exchange.items]
            self._copies[id(exchange)] = (exchange, found)  # kept so that its id is not reused
        return self._copies[id(exchange)][1]

    def _plan_copies(self, item: Item, shards: int) -> CopyPlan:
        parts = segments(item.entry.row, self.architecture, item.part, 0, shards)
        if item.entry.megatron in self._adapted:
            return item, None, [(part.hf, part.own) for part in parts]
        parameter = self._held[item.entry.megatron].detach()
        found, size = [r for p in parts for r in runs(p.hf, p.own)], parameter.dtype.itemsize
        # Raw host memory: a libc call takes a third of the time of a torch call.
        if (
            parameter.device.type == "cpu"
            and parameter.dtype == item.tensor.dtype
            and len(found) <= _MOST_RAW
            and all(run.length * size <= _LONGEST_RAW for run in found)
        ):
            raw = [(run.hf * size, run.own * size, run.length * size) for run in found]
            return item, (parameter, raw), ()
        if len(found) == len(parts):  # one run each
            regions = [(_line(run.hf, run.length), _line(run.own, run.length)) for run in found]
        else:
            regions = [(part.hf, part.own) for part in parts]
        return item, None, [(hf, self.view(item.entry, own)) for hf, own in regions]

    def forget(self) -> None:
        """Drop everything cached for plans."""
        self._views.clear()
        self._copies.clear()


def stream_alone(exchange: Exchange, sources: Sources, place: Place) -> Filled:
    """For a rank that holds all items whole: copy straight from the parameters."""
    target: BufferSlice | None = None
    for item, raw, regions in sources.copies(exchange):
        if item.first:
            target = place(item.tensor)
        if target is not None and raw is not None:
            parameter, found = raw
            assert target.offset + item.tensor.nbytes <= target.buffer.nbytes, item.tensor
            to = target.buffer.address + target.offset
            address = parameter.data_ptr()
            for at, start, nbytes in found:
                memmove(to + at, address + start, nbytes)
        elif target is not None:
            typed, first = target.elements(item.tensor.dtype)
            for (size, stride, offset), source in regions:
                view = source
                if isinstance(view, Region):
                    view = sources.view(item.entry, view)
                torch.as_strided(typed, size, stride, first + offset).copy_(view)
        if item.last:
            yield item.tensor, target


def _region(tensor: Tensor, region: Region) -> Tensor:
    offset = tensor.storage_offset() + region.offset
    return tensor.as_strided(region.size, region.stride, offset)


def _line(first: int, length: int) -> Region:
    return Region((length,), (1,), first)
