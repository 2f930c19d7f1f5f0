"""Where worker processes run, whether they run, and whether they are gone.

Whether they run is read from the kernel's accounting. Ray's own threads run in every worker several
times a second, whatever its Python code computes or waits for, even while something holds the GIL
for minutes. So a process whose threads get no CPU time at all, and none of which waits for the CPU
or a disk, has been stopped, however long its work takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

GONE_S = 10.0
_PROCESSES = Path("/proc")
_RAYS_NAME = "ray::"


@dataclass(frozen=True)
class ProcessLocation:
    """Where a worker runs: its Ray node, that node's address, and its process id there."""

    node: str
    pid: int
    address: str


def locate(_worker: Any) -> ProcessLocation:
    """Where this worker process runs."""
    node = ray.get_runtime_context().get_node_id()
    return ProcessLocation(node, os.getpid(), ray.util.get_node_ip_address())


def find_recorded_location(worker: Any) -> ProcessLocation | None:
    """Where a worker runs that is still in its constructor, from Ray's records; None if it has no
    process yet, or if Ray does not tell.
    """
    try:
        from ray._private import state

        entry = state.actors(actor_id=worker._actor_id.hex())
        address = entry["Address"]
        location = ProcessLocation(address["NodeID"], int(entry["Pid"]), address["IPAddress"])
    except (ImportError, AttributeError, KeyError, TypeError):  # not a public API of Ray
        return None
    return location if location.pid > 0 else None


def wait_until_gone(workers: Sequence[Any], locations: Sequence[ProcessLocation]) -> bool:
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
    for pid in (each.pid for each in locations if each.node == here):
        with suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
    return True


@dataclass(frozen=True)
class CpuReading:
    """One reading of a process: the CPU time of its threads so far, whether one of them is runnable
    or waits for a disk, and whether a signal or a debugger has stopped the process.
    """

    ran_ns: int
    wants: bool
    halted: bool

    def follows(self, earlier: CpuReading) -> bool:
        """Whether the process was running since that reading."""
        return self.wants or self.ran_ns != earlier.ran_ns


def read_processes(pids: Iterable[int]) -> dict[int, CpuReading]:
    """A reading of each of these processes on this machine that is a Ray worker.

    Others are left out; the result is empty if the system has no such accounting.
    """
    found = {pid: _read_process(_PROCESSES / str(pid)) for pid in pids}
    return {pid: reading for pid, reading in found.items() if reading is not None}


class CpuTimeReader:
    """`read_processes` on another node, as an actor."""

    def readings(self, pids: list[int]) -> dict[int, CpuReading]:
        """A reading of each of these processes on its node."""
        return read_processes(pids)


def _read_process(process: Path) -> CpuReading | None:
    try:
        # Another process may have this pid by now, or here: containers have their own pids.
        if not (process / "comm").read_text().startswith(_RAYS_NAME):
            return None
        halted = _read_state(process) in "Tt"
        threads = list((process / "task").iterdir())
    except OSError:
        return None
    states, ran = set(), []
    for thread in threads:
        with suppress(OSError):  # the thread has ended meanwhile
            states.add(_read_state(thread))
            ran.append(int((thread / "schedstat").read_text().split()[0]))
    # If the kernel does not count nanoseconds, only a stopped process can be detected.
    return CpuReading(sum(ran), bool(states & set("RD")) or not (ran or halted), halted)


def _read_state(process: Path) -> str:
    """The kernel's state letter: R is running or runnable, D waits for a disk, T is stopped..."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]
