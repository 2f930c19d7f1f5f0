"""Where worker processes run, and whether they are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

GONE_S = 10.0


@dataclass(frozen=True)
class ProcessLocation:
    """Where a worker runs: its Ray node, that node's address, and its process id there."""

    node: str
    pid: int
    address: str


def place_of(_worker: Any) -> ProcessLocation:
    """Where this worker process runs."""
    node = ray.get_runtime_context().get_node_id()
    return ProcessLocation(node, os.getpid(), ray.util.get_node_ip_address())


def recorded_location(worker: Any) -> ProcessLocation | None:
    """Where a worker runs that is still in its constructor, from Ray's records; None if it has no
    process yet, or if Ray does not tell.
    """
    try:
        from ray._private import state

        entry = state.actors(actor_id=worker._actor_id.hex())
        address = entry["Address"]
        place = ProcessLocation(address["NodeID"], int(entry["Pid"]), address["IPAddress"])
    except (ImportError, AttributeError, KeyError, TypeError):  # not a public API of Ray
        return None
    return place if place.pid > 0 else None


def all_gone(workers: Sequence[Any], places: Sequence[ProcessLocation]) -> bool:
    """Wait until Ray reports these workers dead and their processes on this node are gone."""
    deadline = time.monotonic() + GONE_S
    here = ray.get_runtime_context().get_node_id()
    for worker in workers:
        try:
            ray.get(worker.__ray_ready__.remote(), timeout=max(0.1, deadline - time.monotonic()))
        except GetTimeoutError:
            return False
        except RayError:
            continue
    local = [place.pid for place in places if place.node == here]
    while any(_exists(pid) for pid in local):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
