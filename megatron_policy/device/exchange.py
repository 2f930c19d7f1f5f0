"""Swaps tensors with copies of them in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_policy.device import is_accelerated, synchronize

Pair = tuple[Tensor, tuple[Tensor, ...]]
"""A contiguous tensor, and pieces of host memory, uint8, that together have its bytes."""


@torch.no_grad()
def swap(pairs: Sequence[Pair]) -> None:
    """Exchange the content of each tensor and its pieces, pinned on a GPU; all of it is done when
    this returns. If it is interrupted, every tensor has its former content.

    Besides the tensors, memory holds at most two more, as large as the largest. On a GPU, one
    tensor is on its way out while the next comes in.
    """
    if not pairs:
        return
    buffer = _DoubleBuffer(pairs)
    done = 0
    try:
        for pair in pairs:
            buffer.exchange(*pair)
            done += 1
    except BaseException:
        synchronize()
        if done:
            swap(pairs[:done])
        raise
    finally:
        synchronize()  # also before the buffers are freed


@torch.no_grad()
def copy_out(pairs: Iterable[Pair]) -> None:
    """Copy the content of each tensor to its pieces; all of it is there when this returns."""
    for tensor, pieces in pairs:
        _copy(pieces, _bytes(tensor), out=True)
    synchronize()


class _DoubleBuffer:
    """Two buffers that content passes through in turns, on its way out; on a GPU on a stream of
    its own, which waits until the pieces have been read.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        largest, where = max(_bytes(tensor).numel() for tensor, _ in pairs), pairs[0][0].device
        turns = 2 if is_accelerated() else 1
        self._buffers = [
            torch.empty(largest, dtype=torch.uint8, device=where) for _ in range(turns)
        ]
        self._left: list[torch.cuda.Event | None] = [None] * turns
        self._stream = torch.cuda.Stream() if is_accelerated() else None
        self._turn = 0

    def exchange(self, tensor: Tensor, pieces: Sequence[Tensor]) -> None:
        """Queue the exchange of one pair."""
        content, turn = _bytes(tensor), self._turn
        self._turn = (turn + 1) % len(self._buffers)
        if (left := self._left[turn]) is not None:
            torch.cuda.current_stream().wait_event(left)
        held = self._buffers[turn][: content.numel()].copy_(content)
        try:
            _copy(pieces, content)
            if self._stream is None:
                _copy(pieces, held, out=True)
                return
            self._stream.wait_event(torch.cuda.current_stream().record_event())
            with torch.cuda.stream(self._stream):
                _copy(pieces, held, out=True)
            self._left[turn] = self._stream.record_event()
        except BaseException:
            content.copy_(held)
            raise


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _copy(pieces: Iterable[Tensor], content: Tensor, out: bool = False) -> None:
    """Copy the pieces to the content, or the content `out` to the pieces."""
    start = 0
    for piece in pieces:
        part = content[start : start + piece.numel()]
        target, source = (piece, part) if out else (part, piece)
        target.copy_(source, non_blocking=True)
        start += piece.numel()
