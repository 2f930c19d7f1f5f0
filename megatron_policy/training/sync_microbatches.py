"""Keeps data-parallel ranks synchronised: the same number of microbatches on each, and an error on
one reported to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_policy.device import current_device
from megatron_policy.errors import BatchError
from megatron_policy.training.batching import Batcher, GlobalBatch


def cut_synchronized(
    cut: Callable[[], list[GlobalBatch]], batcher: Batcher, group: dist.ProcessGroup
) -> list[GlobalBatch]:
    """Call `cut` on this rank's data, and fill up each global batch to the largest number of
    microbatches on any rank of `group`.

    What `cut` raises is raised here, and a BatchError on the other ranks, so that none waits.
    """
    try:
        batches = cut()
    except Exception:
        # Any exception: otherwise the others would wait, or mistake the next call's message.
        largest([1, 0, 0], group)
        raise
    number = len(batches)
    refused, most, least = largest([0, number, -number], group)
    if refused:
        raise BatchError("another data-parallel rank has refused its data; its error says why")
    if most != -least:
        raise BatchError(
            f"this data-parallel rank has {number} global batches, but ranks have between "
            f"{-least} and {most}: pass every rank the same number"
        )
    counts = largest([len(batch.microbatches) for batch in batches], group)
    return [
        GlobalBatch(batch.data, batcher.filled_up(batch.microbatches, count, batch.data))
        for batch, count in zip(batches, counts, strict=True)
    ]


def largest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The largest of each number over the group's ranks."""
    found = torch.tensor(numbers, device=current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    numbers_found: list[int] = found.tolist()
    return numbers_found
