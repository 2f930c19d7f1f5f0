"""Stages write items in host memory.

On the CPU a blocking save writes straight from the policy's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from megatron_policy.checkpoint.local_shards import WriteItem
from megatron_policy.device import (
    is_accelerated,
    make_side_stream,
    on_side_stream,
    queued,
    spare_cores,
)
from megatron_policy.formats.tensors import flat_bytes
from megatron_policy.memory.pinned_pool import PinnedMemoryPool, PoolSlice

WINDOW_BYTES = 256 << 20
"""Device memory copied to the host at a time in a blocking save."""

Ready = tuple[WriteItem, list[memoryview]]
"""A write item and its bytes, in host memory."""


class Staging:
    """Copies of all items to pool memory, in background threads; iterating waits for all of them.

    The copies are of the items at construction: these must neither change nor move before `wait`
    has returned.
    """

    def __init__(self, items: Sequence[WriteItem], pool: PinnedMemoryPool) -> None:
        """MemoryError, or what the pool raises, if there is not enough memory for all of them."""
        self._items = items
        self._regions = [pool.take(item.tensor.nbytes) for item in items]
        threads = 1 if is_accelerated() else spare_cores()
        # Dealt round-robin, largest first: about as many bytes to each thread.
        pairs = [(i.tensor.view(torch.uint8), r) for i, r in zip(items, self._regions, strict=True)]
        order = sorted(pairs, key=lambda pair: -pair[0].nbytes)
        point, stream = queued(), make_side_stream()
        workers = ThreadPoolExecutor(threads, "checkpoint-staging")
        # Submit everything here: later the interpreter may be ending and accept no more work.
        self._copies: list[Future[None]] = []
        try:
            for n in range(threads):
                self._copies.append(workers.submit(_copy, order[n::threads], point, stream))
        except BaseException:
            self.wait()
            raise
        finally:
            workers.shutdown(wait=False)

    def wait(self) -> None:
        """Return when the items are no longer being read, whether or not all were copied."""
        wait(self._copies)

    def __iter__(self) -> Iterator[Ready]:
        """Iterate over the copies; if one failed, its error is raised before the first."""
        for copy in self._copies:
            copy.result()
        for item, region in zip(self._items, self._regions, strict=True):
            yield item, [flat_bytes(piece) for piece in region]


def stage_in_turn(
    items: Sequence[WriteItem], host_memory: Callable[[], PinnedMemoryPool]
) -> Iterator[Ready]:
    """The items in host memory, for a blocking save: their own memory, which must not change while
    it is in use, or copies of a few at a time; each must be used before the next is requested.
    """
    if all(item.tensor.device.type == "cpu" for item in items):
        for item in items:
            yield item, [flat_bytes(item.tensor)]
        return
    windows: list[list[WriteItem]] = []
    held = 0
    for item in items:
        if not windows or held + item.tensor.nbytes > WINDOW_BYTES:
            windows.append([])
            held = 0
        windows[-1].append(item)
        held += item.tensor.nbytes
    for window in windows:
        pool = host_memory()
        pool.reset()
        yield from Staging(window, pool)


def _copy(pairs: Sequence[tuple[Tensor, PoolSlice]], point: Any, stream: Any) -> None:
    with on_side_stream(point, stream):
        for source, region in pairs:
            start = 0
            for piece in region:
                piece.copy_(source[start : start + piece.numel()], non_blocking=True)
                start += piece.numel()
