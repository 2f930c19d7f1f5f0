"""Brings what is to be written into host memory; knows neither files nor what it is.

On the CPU a save that blocks writes straight from where the policy computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megatron_policy.checkpoint.holdings import Item
from megatron_policy.conversion.tensors import flat_bytes
from megatron_policy.device import is_accelerated, spare_cores, synchronize
from megatron_policy.model.host_pool import HostPool, Region

WINDOW_BYTES = 256 << 20
"""Of device memory that is brought to the host at a time, in a save that blocks."""

Ready = tuple[Item, list[memoryview]]
"""An item and its bytes, in host memory."""


def in_place(items: Iterable[Item]) -> Iterator[Ready]:
    """The items' own memory, which must not change while it is used."""
    for item in items:
        yield item, [flat_bytes(item.tensor)]


def staged(items: Sequence[Item], pool: HostPool) -> list[Ready]:
    """Copies of all items in memory of the pool, complete when this returns."""
    rooms = [(item.tensor.view(torch.uint8), pool.take(item.tensor.nbytes)) for item in items]
    threads = 1 if is_accelerated() else spare_cores()
    # Dealt like cards, largest first: as many bytes to each.
    order = sorted(rooms, key=lambda room: -room[0].nbytes)
    with ThreadPoolExecutor(threads) as workers:
        list(workers.map(_copy, [order[n::threads] for n in range(threads)]))
    synchronize()
    return [
        (item, [flat_bytes(piece) for piece in region])
        for item, (_, region) in zip(items, rooms, strict=True)
    ]


def in_windows(items: Iterable[Item], pool: HostPool) -> Iterator[Ready]:
    """Copies of a few items at a time; each is to be used before the next is asked for."""
    window: list[Item] = []
    held = 0
    for item in items:
        if held and held + item.tensor.nbytes > WINDOW_BYTES:
            yield from _emptied(window, pool)
            window, held = [], 0
        window.append(item)
        held += item.tensor.nbytes
    yield from _emptied(window, pool)


def written_from(items: Sequence[Item], pool: Callable[[], HostPool]) -> Iterator[Ready]:
    """How a save that blocks gets at the items, wherever they are."""
    if all(item.tensor.device.type == "cpu" for item in items):
        return in_place(items)
    return in_windows(items, pool())


def _emptied(window: Sequence[Item], pool: HostPool) -> Iterator[Ready]:
    pool.reset()
    yield from staged(window, pool)


def _copy(rooms: Sequence[tuple[Tensor, Region]]) -> None:
    for source, region in rooms:
        start = 0
        for piece in region:
            piece.copy_(source[start : start + piece.numel()], non_blocking=True)
            start += piece.numel()
