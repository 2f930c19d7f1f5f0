"""What one-sided movers of bytes have in common."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Writing(Protocol):
    """A write that has been started."""

    def wait(self) -> None:
        """Return when the bytes are there; RefitError if that takes too long, or fails."""


class Mover(Protocol):
    """Memory of this process, from which it writes into that of other movers of the same kind, and
    into which they write: the owner takes no part in that, and hears of it by other means.

    A mover is made with the size of its memory, the most seconds of a wait, and what is called
    during a wait, which ends when that raises.
    """

    @property
    def memory(self) -> Tensor:
        """Its memory, flat uint8, in host memory."""

    @property
    def description(self) -> bytes:
        """What another process needs to write into this memory, a few hundred bytes."""

    def write(self, to: bytes, chunk: Tensor, at: int) -> Writing:
        """Start to write a contiguous part of this memory, which stays as it is meanwhile, into the
        memory that is described by `to`, from its byte `at` on. RefitError if that cannot be
        reached, or is smaller.
        """

    def close(self) -> None:
        """Release the memory. What others still write never reaches that of a later mover."""
