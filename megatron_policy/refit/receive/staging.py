"""The memory in which an engine receives the streams of a refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_policy.refit.receive.assembler import WeightAssembler
from megatron_policy.refit.transports.collective.chunks import (
    ChunkReader,
    Reader,
    WholeReader,
    views_of,
)
from megatron_policy.refit.transports.collective.stream_layout import Stream


def readers_of(
    streams: Sequence[Stream], chunk_bytes: int, where: torch.device, assembler: WeightAssembler
) -> list[Reader]:
    """One reader for each stream. A staged assembler keeps the memory that chunks are received in,
    so nothing is copied; a later refit of the same streams reuses that memory.
    """
    if not assembler.staged:
        return [ChunkReader(stream, chunk_bytes, where) for stream in streams]
    readers: list[Reader] = []
    for stream in streams:
        memory = _kept_memory(stream, assembler.kept)
        if memory is None:
            memory = torch.empty(stream.nbytes, dtype=torch.uint8, device=where)
            assembler.kept.update(views_of(stream, memory))
        readers.append(WholeReader(stream, memory, assembler.kept))
    return readers


def _kept_memory(stream: Stream, kept: Mapping[str, Tensor]) -> Tensor | None:
    """The memory of which the kept tensors of this stream are views, if they are."""
    names = [slot.name for slot in stream.slots]
    if not names or any(name not in kept for name in names):
        return None
    storage = kept[names[0]].untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if memory.numel() != stream.nbytes:
        return None
    for name, view in views_of(stream, memory).items():
        had = kept[name]
        if (had.data_ptr(), had.shape, had.dtype) != (view.data_ptr(), view.shape, view.dtype):
            return None
    return memory
