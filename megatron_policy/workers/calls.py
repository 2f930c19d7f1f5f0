"""Puts arguments into Ray's object store and waits for answers; knows no methods or models."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from pickle import PicklingError
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_policy.errors import ConfigError
from megatron_policy.workers.failure import Failure

# After a failure the others get this long to report: an exception may be the echo of a death that
# Ray reports later.
GRACE_S = 1.5
GRACE_AFTER_DEATH_S = 0.5
# A refusal harms nobody unless a rank is stuck: give slower ranks time to show that they are not.
GRACE_AFTER_REFUSAL_S = 5.0


def gather(
    refs: Sequence[ray.ObjectRef], wanted: Collection[int]
) -> tuple[dict[int, Any], list[Failure], list[int]]:
    """Wait for all, or a little longer than for the first failure.

    Returns the `wanted` results by rank, the failures in time order, and the ranks still busy.
    """
    pending = {ref: rank for rank, ref in enumerate(refs)}
    values: dict[int, Any] = {}
    failures: list[Failure] = []
    deadline: float | None = None
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=left)
        if not ready:
            break
        rank = pending.pop(ready[0])
        try:
            value = ray.get(ready[0])
        except RayError as error:
            failures.append(Failure.of(rank, error))
            deadline = min(deadline or math.inf, time.monotonic() + _grace(failures[-1]))
        else:
            if rank in wanted:
                values[rank] = value
    return values, failures, sorted(pending.values())


def _grace(failure: Failure) -> float:
    if failure.died:
        return GRACE_AFTER_DEATH_S
    return GRACE_AFTER_REFUSAL_S if failure.refused else GRACE_S


def stored(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, all but plain scalars in the object store, so that each travels once."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else put(name, value)
        for name, value in kwargs.items()
    }


def put(name: str, value: Any) -> ray.ObjectRef:
    """The argument `name` in the object store; ConfigError for what cannot leave this process."""
    try:
        return ray.put(value)
    except (TypeError, PicklingError) as error:
        raise ConfigError(
            f"{name}, a {type(value).__name__}, cannot be sent to the workers: {str(error).strip()}"
        ) from error
