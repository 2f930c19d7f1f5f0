"""Puts arguments into Ray's object store and waits for results."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from pickle import PicklingError
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_policy.errors import ConfigError
from megatron_policy.workers.cluster.failure import Failure
from megatron_policy.workers.cluster.watch import Watch

# After a failure the others get this long to report: an exception may be the consequence of a death
# that Ray reports later.
GRACE_S = 1.5
GRACE_AFTER_DEATH_S = 0.5
# A refusal does no harm unless a rank is stuck: give slower ranks time to show that they are not.
GRACE_AFTER_REFUSAL_S = 5.0


def gather(
    refs: Sequence[ray.ObjectRef], wanted: Collection[int], watch: Watch
) -> tuple[dict[int, Any], list[Failure], list[int]]:
    """Wait for all, or until shortly after the first failure, which `watch` may also find.

    Returns the `wanted` results by rank, the failures in time order, and the ranks still busy.
    """
    pending = dict(enumerate(refs))
    values: dict[int, Any] = {}
    failures: list[Failure] = []
    deadline = math.inf

    def note(failure: Failure) -> None:
        nonlocal deadline
        failures.append(failure)
        grace = GRACE_AFTER_REFUSAL_S if failure.refused else GRACE_S
        grace = GRACE_AFTER_DEATH_S if failure.died else grace
        deadline = min(deadline, time.monotonic() + grace)

    while pending:
        left = max(0.0, deadline - time.monotonic())
        timeout = min(left, watch.interval_s)
        ready, _ = ray.wait(list(pending.values()), num_returns=1, timeout=timeout)
        if not ready and left == 0.0:
            break
        for rank in [rank for rank, ref in pending.items() if ref in ready]:
            try:
                value = ray.get(pending.pop(rank))
            except RayError as error:
                note(Failure.of(rank, error))
            else:
                if rank in wanted:
                    values[rank] = value
        watch.look()
        for failure in watch.find_lost(pending):
            del pending[failure.rank]
            note(failure)
    for failure in watch.find_halted(pending) if failures else ():
        del pending[failure.rank]
        failures.append(failure)
    return values, failures, sorted(pending)


def put_all(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, all but plain scalars in the object store, so that each is sent once."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else put(name, value)
        for name, value in kwargs.items()
    }


def put(name: str, value: Any) -> ray.ObjectRef:
    """Put the argument `name` into the object store; ConfigError if it cannot be pickled."""
    try:
        return ray.put(value)
    except (TypeError, PicklingError) as error:
        raise ConfigError(
            f"{name}, a {type(value).__name__}, cannot be sent to the workers: {str(error).strip()}"
        ) from error
