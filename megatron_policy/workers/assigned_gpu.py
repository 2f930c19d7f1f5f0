"""Which of the visible GPUs Ray has given this worker."""

from __future__ import annotations

import sys

ALL_VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""The environment of a worker that sees all GPUs of its node, not only those that it was given."""


def list_given_gpus() -> list[str]:
    """The GPUs that Ray gave this worker; none outside Ray."""
    ray = sys.modules.get("ray")  # every worker of Ray has imported it, and Ray may be missing
    # Without Ray running, the call would start one, or join any on this node.
    return [str(gpu) for gpu in ray.get_gpu_ids()] if ray and ray.is_initialized() else []


def find_own_gpu(visible: str | None) -> int | None:
    """The place of this worker's GPU among the `visible` ones (CUDA_VISIBLE_DEVICES; None if it is
    not set); None if Ray gave none or several, or one that is not visible.

    Ray makes the GPUs it gave the only visible ones, unless it was told not to (`ALL_VISIBLE`):
    then every worker sees those of the node. It lists all of CUDA_VISIBLE_DEVICES, in any order,
    where that has fewer than Ray counts.
    """
    given = list_given_gpus()
    if len(given) != 1:
        return None
    if visible is None:
        return int(given[0]) if given[0].isdigit() else None
    numbers = [each.strip() for each in visible.split(",")]
    return numbers.index(given[0]) if given[0] in numbers else None
