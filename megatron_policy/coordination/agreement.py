"""What the ranks of a process group of training find out together, so that none waits for another
that has refused its part. The group's own timeout bounds every wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_policy.device import current_device

T = TypeVar("T")

_WIDTH = 2  # of every message, so that ranks in different calls at least do not wait


def find_largest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The largest of each number over the group's ranks."""
    found = torch.tensor(numbers, device=current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    numbers_found: list[int] = found.tolist()
    return numbers_found


def gather_numbers(
    own: Sequence[Sequence[float]], group: dist.ProcessGroup
) -> list[list[list[float]]]:
    """The rows of numbers of each of the group's ranks, in fp64; all have as many rows, and as many
    numbers in each.
    """
    numbers = torch.tensor(own, dtype=torch.float64, device=current_device())
    found = [torch.empty_like(numbers) for _ in range(group.size())]
    dist.all_gather(found, numbers, group=group)
    return [each.tolist() for each in found]


def gather_lists(own: Iterable[T], group: dist.ProcessGroup) -> list[T]:
    """What each of the group's ranks has, one rank after another."""
    box: list[Any] = [None] * group.size()
    dist.all_gather_object(box, list(own), group=group)
    return [each for one in box for each in one]


def prepare_together(
    prepare: Callable[[], T],
    numbers: Callable[[T], Sequence[int]],
    group: dist.ProcessGroup,
    refused: Exception,
) -> tuple[T, list[int]]:
    """What `prepare` returns here, and the largest on any rank of the `numbers` of it, at most 2.

    What `prepare` raises is raised here, and `refused` on the other ranks.
    """
    try:
        prepared = prepare()
    except Exception:
        # Any exception: otherwise the others would wait, or mistake the next call's message.
        find_largest([1, *[0] * _WIDTH], group)
        raise
    own = list(numbers(prepared))
    failed, *found = find_largest([0, *own, *[0] * (_WIDTH - len(own))], group)
    if failed:
        raise refused
    return prepared, found[: len(own)]
