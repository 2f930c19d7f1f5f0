"""A reusable pool of pinned host memory for copies of device memory, and other values of parameters
there that are exchanged with their own on demand.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_policy.device import host_buffer
from megatron_policy.device.exchange import copy_out, swap

# Pinned memory is allocated in powers of two: whole blocks waste none of it, one allocation per
# tensor would waste up to half.
BLOCK_BYTES = 64 << 20
ALIGNMENT = 512

PoolSlice = tuple[torch.Tensor, ...]
"""uint8 pieces of blocks, in order."""


def page_locked(nbytes: int) -> torch.Tensor:
    """uint8 `[nbytes]` in host memory, pinned if a GPU will copy to and from it."""
    return host_buffer(torch.empty(nbytes, dtype=torch.uint8, device="meta"))


class PinnedMemoryPool:
    """Blocks of host memory, and the buffer slices taken from them.

    `reset` takes all slices back; requests for the same sizes in the same order then get the same
    memory.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor] = page_locked,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._allocate, self._block_bytes = allocate, block_bytes
        self._blocks: list[torch.Tensor] = []
        self._used = 0  # bytes from the start of the first block
        self._returned: defaultdict[int, deque[PoolSlice]] = defaultdict(deque)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, taken or not."""
        return len(self._blocks) * self._block_bytes

    def take(self, nbytes: int) -> PoolSlice:
        """A slice of `nbytes` bytes. If a new block cannot be allocated the allocator's error is
        raised and no slice is taken.
        """
        if self._returned[nbytes]:
            return self._returned[nbytes].popleft()
        end = self._used + nbytes
        while self.nbytes < end:
            self._blocks.append(self._allocate(self._block_bytes))
        pieces, start = [], self._used
        while start < end:
            index, offset = divmod(start, self._block_bytes)
            length = min(end - start, self._block_bytes - offset)
            pieces.append(self._blocks[index].narrow(0, offset, length))
            start += length
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return tuple(pieces)

    def release(self, region: PoolSlice) -> None:
        """Take a slice back, for reuse at the same size."""
        self._returned[sum(piece.numel() for piece in region)].append(region)

    def reset(self) -> None:
        """Take every slice back."""
        self._used = 0
        self._returned.clear()


class HostCopies:
    """Parameters as they were when this was made, in (pinned) host memory.

    While they are exchanged that memory holds the parameters' own values. The two are swapped
    tensor by tensor, so the device never holds more than two extra tensors and the host never more
    than one copy.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], block_bytes: int = BLOCK_BYTES) -> None:
        """`block_bytes` is what host memory is allocated in."""
        self._parameters = tuple(parameters)
        pool = PinnedMemoryPool(block_bytes=block_bytes)
        self._copies = tuple(pool.take(p.data.nbytes) for p in self._parameters)
        copy_out(self._pairs())

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(piece.nbytes for pieces in self._copies for piece in pieces)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """In this context the parameters have the other values. Their own, as they are changed
        meanwhile, come back afterwards; what they have then is kept for the next time.
        """
        swap(self._pairs())
        try:
            yield
        finally:
            swap(self._pairs())

    def _pairs(self) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        # Read anew: gradient buffers and offloading give parameters other memory.
        return [(p.data, pieces) for p, pieces in zip(self._parameters, self._copies, strict=True)]
