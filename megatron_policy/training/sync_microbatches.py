"""Keeps data-parallel ranks in step: as many microbatches on each, and one's refusal heard by all;
knows no losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_policy.device import current_device
from megatron_policy.errors import BatchError
from megatron_policy.training.batching import Batcher, GlobalBatch


def cut_in_step(
    cut: Callable[[], list[GlobalBatch]], batcher: Batcher, group: dist.ProcessGroup
) -> list[GlobalBatch]:
    """What `cut` makes of this rank's data, with as many microbatches in each global batch as the
    rank of `group` has that has most of them.

    What `cut` raises is raised here, and a BatchError on the other ranks: none waits for another.
    """
    try:
        batches = cut()
    except Exception:
        # Whatever it is: the others would wait, or take the next call's message for this one's.
        largest([1, 0, 0], group)
        raise
    number = len(batches)
    refused, most, least = largest([0, number, -number], group)
    if refused:
        raise BatchError("another data-parallel rank has refused its data; its error says why")
    if most != -least:
        raise BatchError(
            f"{number} global batches on this data-parallel rank, but {-least} to {most} on the "
            "ranks: pass every rank the same number"
        )
    counts = largest([len(batch.microbatches) for batch in batches], group)
    return [
        GlobalBatch(batch.data, batcher.in_step(batch.microbatches, count, batch.data))
        for batch, count in zip(batches, counts, strict=True)
    ]


def largest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The largest of each number over the group's ranks."""
    found = torch.tensor(numbers, device=current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    numbers_found: list[int] = found.tolist()
    return numbers_found
