"""Detects from the kernel's accounting whether worker processes are running.

Ray's own threads run in every worker several times a second, whatever its Python code computes or
waits for, even while something holds the GIL for minutes. So a process whose threads get no CPU
time at all, and none of which waits for the CPU or a disk, has been stopped, however long its work
takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROCESSES = Path("/proc")
_RAYS_NAME = "ray::"


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


def readings_of(pids: Iterable[int]) -> dict[int, CpuReading]:
    """A reading of each of these processes on this machine that is a Ray worker.

    Others are left out; the result is empty if the system has no such accounting.
    """
    found = {pid: _reading_of(_PROCESSES / str(pid)) for pid in pids}
    return {pid: reading for pid, reading in found.items() if reading is not None}


class CpuTimeReader:
    """`readings_of` on another node, as an actor."""

    def readings(self, pids: list[int]) -> dict[int, CpuReading]:
        """See `readings_of`."""
        return readings_of(pids)


def _reading_of(process: Path) -> CpuReading | None:
    try:
        # Another process may have this pid by now, or here: containers have their own pids.
        if not (process / "comm").read_text().startswith(_RAYS_NAME):
            return None
        halted = _state_of(process) in "Tt"
        threads = list((process / "task").iterdir())
    except OSError:
        return None
    states, ran = set(), []
    for thread in threads:
        with suppress(OSError):  # the thread has ended meanwhile
            states.add(_state_of(thread))
            ran.append(int((thread / "schedstat").read_text().split()[0]))
    # If the kernel does not count nanoseconds, only a stopped process can be detected.
    return CpuReading(sum(ran), bool(states & set("RD")) or not (ran or halted), halted)


def _state_of(process: Path) -> str:
    """The kernel's state letter: R is running or runnable, D waits for a disk, T is stopped..."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]
