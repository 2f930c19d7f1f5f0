"""Empties device storages in place and refills them from host copies.

Only the memory behind a storage is freed and restored; tensors, and views of them, stay valid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_policy.device import synchronize
from megatron_policy.memory.pinned_pool import PinnedMemoryPool, PoolSlice

Resize = Callable[[torch.UntypedStorage, int], object]
"""Sets a storage's size in bytes; RuntimeError if there is not enough memory."""


@dataclass(frozen=True)
class _Emptied:
    """A storage without memory, and its content; None if the content is not needed."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: PoolSlice | None


class StorageOffloader:
    """The emptied storages of one kind. Their copies are in `pool`; without one they come back as
    zeros.

    If a call fails half-way, each storage is either on the device or offloaded, and the same call
    continues from there.
    """

    def __init__(
        self, pool: PinnedMemoryPool | None, resize: Resize = torch.UntypedStorage.resize_
    ) -> None:
        self._pool, self._resize = pool, resize
        self._emptied: deque[_Emptied] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that the emptied storages had."""
        return sum(each.nbytes for each in self._emptied)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory kept for copies, in use or for reuse."""
        return 0 if self._pool is None else self._pool.nbytes

    def empty(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Copy each storage's content to the host and free its memory."""
        try:
            for storage in storages:
                nbytes = storage.nbytes()
                region = None if self._pool is None else self._pool.take(nbytes)
                for piece, part in _pairs(region or (), storage):
                    piece.copy_(part, non_blocking=True)
                self._emptied.append(_Emptied(storage, nbytes, region))
                storage.resize_(0)
        finally:
            synchronize()

    def refill(self) -> None:
        """Restore every emptied storage's memory and content, in the order they were emptied."""
        arrived: list[PoolSlice] = []
        try:
            while self._emptied:
                self._restore(self._emptied[0])
                arrived.append(self._emptied.popleft().copy or ())
        finally:
            synchronize()
            if self._pool is not None and not self._emptied:
                self._pool.reset()
            elif self._pool is not None:
                for region in arrived:
                    self._pool.release(region)

    def _restore(self, emptied: _Emptied) -> None:
        storage = emptied.storage
        assert storage.nbytes() == 0, "somebody else has given an emptied storage memory"
        self._resize(storage, emptied.nbytes)
        try:
            if emptied.copy is None:
                _bytes_of(storage).zero_()
            for piece, part in _pairs(emptied.copy or (), storage):
                part.copy_(piece, non_blocking=True)
        except BaseException:
            storage.resize_(0)
            raise


def _pairs(
    region: PoolSlice, storage: torch.UntypedStorage
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece of the region with the part of the storage that it holds."""
    content, start = _bytes_of(storage), 0
    for piece in region:
        yield piece, content[start : start + piece.numel()]
        start += piece.numel()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
