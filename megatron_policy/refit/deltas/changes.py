"""What a rank has changed of the weights: its own parts of the Hugging Face tensors, compared with
a copy of what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.regions import Region, flatten
from megatron_policy.converters.table import Entry
from megatron_policy.device import spare_cores, synchronize
from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.buffers import align
from megatron_policy.refit.deltas.arrays import Bits, Words
from megatron_policy.refit.deltas.codec import (
    SUMS,
    Pieces,
    encode,
    sum_elements,
    take_changes,
    view_bits,
)
from megatron_policy.refit.deltas.message import Fragment
from megatron_policy.refit.plan import STREAM_ALIGNMENT, Exchange, RefitPlan, RefitTensor
from megatron_policy.weights.geometry import segments

_STEP = 1 << 20  # bytes that are cast, moved or gathered at a time: they stay in the cache
_SHORTEST = 1 << 7  # elements: a call for several pieces of so many is faster than gathering them
_WORTH_A_THREAD = 1 << 23  # bytes

View = Callable[[Entry, Region], Tensor]
"""Those elements of this rank's parameter, as they are now."""


class OwnShare(NamedTuple):
    """What one rank alone sends of an HF tensor: regions of it, and of the parameter."""

    tensor: RefitTensor
    entry: Entry
    pieces: tuple[tuple[Region, Region], ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return sum(hf.elements for hf, _ in self.pieces)


def list_shares(
    plan: RefitPlan, architecture: Architecture, topology: Topology, rank: int
) -> Iterator[OwnShare]:
    """The shares of a rank. Those of all ranks cover every element of every tensor once. Pure."""
    at = topology.coords(rank)
    for exchange in plan.exchanges:
        first = topology.expert_coords(rank).edp if exchange.of_experts else at.dp + at.cp
        if first == 0:
            yield from list_group_shares(exchange, architecture, topology, rank)


def list_group_shares(
    exchange: Exchange, architecture: Architecture, topology: Topology, rank: int
) -> Iterator[OwnShare]:
    """The shares of a rank in an exchange. Those of the ranks that exchange it, in all stages,
    cover every element of its tensors once. Pure.
    """
    at, of_experts = topology.coords(rank), topology.expert_coords(rank)
    owner, shard = (of_experts.ep, of_experts.etp) if exchange.of_experts else (0, at.tp)
    for item in exchange.items:
        if item.tensor.stage != at.pp or (exchange.owners > 1 and item.owner != owner):
            continue
        entry = item.entries[owner if exchange.sharing > 1 else 0]
        parts = segments(entry.row, architecture, item.part, shard, exchange.split)
        pieces = tuple((hf, own) for part in parts for _, hf, own in part.pieces(0, part.elements))
        if pieces:
            yield OwnShare(item.tensor, entry, pieces)


def _nbytes(share: OwnShare) -> int:
    return align(share.elements * share.tensor.dtype.itemsize, STREAM_ALIGNMENT)


class _Kept:
    """A copy of a share as it was sent last, and its sum, once it is known."""

    def __init__(self, share: OwnShare, memory: Tensor) -> None:
        self.share = share
        self.words: Words = memory.numpy().view(np.uint64)
        self.elements = memory.view(share.tensor.dtype)[: share.elements]
        self.bits = view_bits(self.elements)
        self.sum: int | None = None


class SentCopy:
    """A copy, in host memory, of a rank's shares as they were sent last.

    The digest of a fragment is the sum of the share, of which no element is read for it that has
    not changed: what the changes add to the sum of the copy is added to the one of before. An
    engine computes it of all elements that it has. So it refuses whatever differs from the copy.
    That the copy is what the rank has rests on the comparison, which reads every element each time.
    If memory fails and a bit of the copy flips, the element is found to differ and is sent again,
    unless training has just made it the same; the sum is then wrong, and engines refuse what is
    right until `forget_sums`.
    """

    def __init__(self, shares: list[OwnShare], view: View) -> None:
        """The copy is of the weights as they are now."""
        self._view, self._viewing, self._shares = view, Lock(), list[_Kept]()
        self.nbytes = sum(map(_nbytes, shares))
        """Bytes of the copy."""
        # NumPy asks for large pages, which are faster to compare. Zeros fill up the last words.
        memory, first = torch.from_numpy(np.zeros(self.nbytes, np.uint8)), 0
        for share in shares:
            self._shares.append(_Kept(share, memory[first : first + _nbytes(share)]))
            first += _nbytes(share)
        for kept in self._shares:
            begin = 0
            for region in self._list_regions(kept.share):
                for block in _cut(region, _STEP // region.itemsize):
                    end = begin + block.numel()
                    kept.elements[begin:end].view(block.shape).copy_(block)
                    begin = end

    def advance(self) -> list[Fragment]:
        """What has changed since, which the copy then has too; after a failure it is of no use."""
        synchronize()  # threads have streams of their own
        threads = min(spare_cores(), 1 + self.nbytes // _WORTH_A_THREAD)
        with ThreadPoolExecutor(threads) as pool:
            found = (pool.map if threads > 1 else map)(self._advance, self._shares)
            return [fragment for fragment in found if fragment is not None]

    def forget_sums(self) -> None:
        """Have the next `advance` compute the sums of the whole copy, as the first one does."""
        for kept in self._shares:
            kept.sum = None

    def _advance(self, kept: _Kept) -> Fragment | None:
        if kept.sum is None:
            kept.sum = sum_elements(kept.bits)
        values, gaps, last, begin = [], [], -1, 0
        for now, pieces, rounded in self._read(kept.share):
            taken = take_changes(now, kept.words, begin, last, pieces=pieces, rounded=rounded)
            values.append(taken.values)
            gaps.append(taken.gaps)
            last, kept.sum = taken.last, (kept.sum + taken.grown) % SUMS
            begin += len(pieces.starts) * pieces.length
        if last < 0:
            return None
        share, of = kept.share, kept.share.tensor
        changed = encode(_join(values), _join(gaps), kept.bits)
        regions = tuple(flatten(hf) for hf, _ in share.pieces)
        return Fragment(of.name, of.dtype, of.shape, regions, changed, f"{kept.sum:016x}")

    def _read(self, share: OwnShare) -> Iterator[tuple[Bits, Pieces, bool]]:
        """The share as it is now, in order: elements, the pieces of them that belong to it, and
        whether they are fp32 that is sent as bfloat16. Host memory is read where it is.
        """
        dtype = share.tensor.dtype
        for region in self._list_regions(share):
            rounded = (region.dtype, dtype) == (torch.float32, torch.bfloat16)
            pieces = _find_pieces(region) if rounded or region.dtype == dtype else None
            if pieces is not None and region.device.type == "cpu":
                yield _view_span(region), pieces, rounded
                continue
            for block in _cut(region, _STEP // dtype.itemsize):
                bits = view_bits(block.to(dtype).cpu().contiguous())
                yield bits, Pieces(np.zeros(1, np.int64), len(bits)), False

    def _list_regions(self, share: OwnShare) -> list[Tensor]:
        with self._viewing:  # what is merged is so for one parameter at a time
            return [self._view(share.entry, own) for _, own in share.pieces]


def _find_pieces(region: Tensor) -> Pieces | None:
    """The contiguous pieces that a view consists of, by places after its first element; None if
    they are too short to be read one after another.
    """
    (*sizes, length), (*strides, step), _ = flatten(Region(region.shape, region.stride(), 0))
    if step != 1 or length < _SHORTEST:
        return None
    starts = np.zeros(1, np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return Pieces(starts, length)


def _view_span(region: Tensor) -> Bits:
    """All memory from the first element of a view to the last one."""
    _, last = Region(region.shape, region.stride(), 0).ends
    return view_bits(region.as_strided((last + 1,), (1,), region.storage_offset()))


def _join(parts: list[Bits]) -> Bits:
    """All of them together; the list is empty afterwards, to free them."""
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    parts.clear()
    return joined


def _cut(region: Tensor, elements: int) -> Iterator[Tensor]:
    """Parts of about so many elements, in order; views."""
    if region.is_contiguous():
        yield from region.reshape(-1).split(elements)
        return
    region = region.squeeze()
    rows = max(1, elements // max(1, region[0].numel()))
    yield from region.split(rows)
