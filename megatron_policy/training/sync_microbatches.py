"""Keeps data-parallel ranks synchronised: the same number of microbatches on each, and an error on
one reported to all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_policy.coordination import agreement
from megatron_policy.errors import BatchError
from megatron_policy.training.batching import Batcher, GlobalBatch
from megatron_policy.training.speed import Share, Workload

T = TypeVar("T")

_REFUSED = "another data-parallel rank has refused its data; its error says why"


def cut_together(
    cut: Callable[[], list[GlobalBatch]], batcher: Batcher, group: dist.ProcessGroup
) -> tuple[list[GlobalBatch], Workload]:
    """Call `cut` on this rank's data, and fill up each global batch to the largest number of
    microbatches on any rank of `group`. Also returns what all these ranks compute.

    What `cut` raises is raised here, and a BatchError on the other ranks, so that none waits.
    """
    batches, (most, least) = agreement.prepare_together(
        cut, lambda cut: [len(cut), -len(cut)], group, BatchError(_REFUSED)
    )
    number = len(batches)
    if most != -least:
        raise BatchError(
            f"this data-parallel rank has {number} global batches, but ranks have between "
            f"{-least} and {most}: pass every rank the same number"
        )
    estimator = batcher.estimator
    own = [estimator.share(batch.data, batch.microbatches) for batch in batches]
    filled, workload = [], Workload()
    ranks = agreement.gather_numbers(own, group)
    for batch, numbers in zip(batches, zip(*ranks, strict=True), strict=True):
        shares = [Share.of(each) for each in numbers]
        count = max(share.microbatches for share in shares)
        microbatches = batcher.fill_up(batch.microbatches, count, batch.data)
        filled.append(GlobalBatch(batch.data, microbatches))
        workload += estimator.workload(shares, len(microbatches))
    return filled, workload


def prepare_together(
    prepare: Callable[[], T], count: Callable[[T], int], group: dist.ProcessGroup
) -> tuple[T, int]:
    """What `prepare` returns here, and the largest `count` of it on any rank of `group`. What it
    raises is raised here, and a BatchError on the other ranks, so that none waits.
    """
    prepared, (most,) = agreement.prepare_together(
        prepare, lambda own: [count(own)], group, BatchError(_REFUSED)
    )
    return prepared, most
