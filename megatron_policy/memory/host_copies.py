"""Other values of parameters, in host memory, that are exchanged with their own on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_policy.device.exchange import copy_out, swap
from megatron_policy.memory.pinned_pool import BLOCK_BYTES, PinnedMemoryPool


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
