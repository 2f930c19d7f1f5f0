"""Keeps data-parallel ranks synchronised: the same number of microbatches on each, and an error on
one reported to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_policy.device import current_device
from megatron_policy.errors import BatchError
from megatron_policy.training.batching import Batcher, GlobalBatch

T = TypeVar("T")


def cut_synchronized(
    cut: Callable[[], list[GlobalBatch]], batcher: Batcher, group: dist.ProcessGroup
) -> list[GlobalBatch]:
    """Call `cut` on this rank's data, and fill up each global batch to the largest number of
    microbatches on any rank of `group`.

    What `cut` raises is raised here, and a BatchError on the other ranks, so that none waits.
    """
    batches, (most, least) = _together(cut, lambda cut: [len(cut), -len(cut)], group)
    number = len(batches)
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


def prepared_together(
    prepare: Callable[[], T], count: Callable[[T], int], group: dist.ProcessGroup
) -> tuple[T, int]:
    """What `prepare` returns here, and the largest `count` of it on any rank of `group`.

    What `prepare` raises is raised here, and a BatchError on the other ranks, so that none waits.
    """
    prepared, (most,) = _together(prepare, lambda own: [count(own)], group)
    return prepared, most


def _together(
    prepare: Callable[[], T], numbers: Callable[[T], Sequence[int]], group: dist.ProcessGroup
) -> tuple[T, list[int]]:
    width = 2  # of every message, so that ranks in different calls at least do not wait
    try:
        prepared = prepare()
    except Exception:
        # Any exception: otherwise the others would wait, or mistake the next call's message.
        largest([1, *[0] * width], group)
        raise
    own = list(numbers(prepared))
    refused, *found = largest([0, *own, *[0] * (width - len(own))], group)
    if refused:
        raise BatchError("another data-parallel rank has refused its data; its error says why")
    return prepared, found[: len(own)]


def largest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The largest of each number over the group's ranks."""
    found = torch.tensor(numbers, device=current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    numbers_found: list[int] = found.tolist()
    return numbers_found
