"""Brings what is to be written into host memory; knows neither files nor what it is.

On the CPU a save that blocks writes straight from where the policy computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from megatron_policy.checkpoint.local_shards import WriteItem
from megatron_policy.device import beside, is_accelerated, queued, spare_cores
from megatron_policy.formats.tensors import flat_bytes
from megatron_policy.memory.pinned_pool import PinnedMemoryPool, PoolSlice

WINDOW_BYTES = 256 << 20
"""Of device memory that is brought to the host at a time, in a save that blocks."""

Ready = tuple[WriteItem, list[memoryview]]
"""An item and its bytes, in host memory."""


def in_place(items: Iterable[WriteItem]) -> Iterator[Ready]:
    """The items' own memory, which must not change while it is used."""
    for item in items:
        yield item, [flat_bytes(item.tensor)]


class Staging:
    """Copies of all items on their way to memory of the pool: iterating waits until all are there.

    They are made beside what the caller goes on to do, of what the items are when this is made:
    they must neither change nor move before `wait` has returned.
    """

    def __init__(self, items: Sequence[WriteItem], pool: PinnedMemoryPool) -> None:
        """MemoryError, or what the pool raises, if there is no room for all of them."""
        self._items = items
        self._regions = [pool.take(item.tensor.nbytes) for item in items]
        threads = 1 if is_accelerated() else spare_cores()
        # ShardedBatch like cards, largest first: as many bytes to each.
        pairs = [(i.tensor.view(torch.uint8), r) for i, r in zip(items, self._regions, strict=True)]
        order = sorted(pairs, key=lambda pair: -pair[0].nbytes)
        point, workers = queued(), ThreadPoolExecutor(threads, "checkpoint-staging")
        # All is given to them here: later, the interpreter may be ending and take nothing any more.
        self._copies: list[Future[None]] = []
        try:
            for n in range(threads):
                self._copies.append(workers.submit(_copy, order[n::threads], point))
        except BaseException:
            self.wait()
            raise
        finally:
            workers.shutdown(wait=False)

    def wait(self) -> None:
        """Return when the items are read no more, whether or not all could be copied."""
        wait(self._copies)

    def __iter__(self) -> Iterator[Ready]:
        """What made a copy fail is raised before the first."""
        for copy in self._copies:
            copy.result()
        for item, region in zip(self._items, self._regions, strict=True):
            yield item, [flat_bytes(piece) for piece in region]


def in_windows(items: Iterable[WriteItem], pool: PinnedMemoryPool) -> Iterator[Ready]:
    """Copies of a few items at a time; each is to be used before the next is asked for."""
    window: list[WriteItem] = []
    held = 0
    for item in items:
        if held and held + item.tensor.nbytes > WINDOW_BYTES:
            yield from _emptied(window, pool)
            window, held = [], 0
        window.append(item)
        held += item.tensor.nbytes
    yield from _emptied(window, pool)


def written_from(
    items: Sequence[WriteItem], pool: Callable[[], PinnedMemoryPool]
) -> Iterator[Ready]:
    """How a save that blocks gets at the items, wherever they are."""
    if all(item.tensor.device.type == "cpu" for item in items):
        return in_place(items)
    return in_windows(items, pool())


def _emptied(window: Sequence[WriteItem], pool: PinnedMemoryPool) -> Iterator[Ready]:
    pool.reset()
    yield from Staging(window, pool)


def _copy(pairs: Sequence[tuple[Tensor, PoolSlice]], point: Any) -> None:
    with beside(point):
        for source, region in pairs:
            start = 0
            for piece in region:
                piece.copy_(source[start : start + piece.numel()], non_blocking=True)
                start += piece.numel()
