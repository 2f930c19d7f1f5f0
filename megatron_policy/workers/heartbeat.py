"""Whether workers' processes run, by the account that their system keeps; knows no cluster.

Threads of Ray's own run in every worker several times a second, whatever its Python computes or
waits for, and also while something holds Python's lock for minutes. So a process whose threads get
no time at all, and of which none waits for the processor or a disk, was stopped, however long its
work may take otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROCESSES = Path("/proc")
_RAYS_NAME = "ray::"


@dataclass(frozen=True)
class Beat:
    """One reading of a process: the time that its threads have run so far, whether one of them
    would run if the machine let it, and whether a signal or a debugger holds the process.
    """

    ran_ns: int
    wants: bool
    halted: bool

    def follows(self, earlier: Beat) -> bool:
        """Whether the process was not stopped since that reading."""
        return self.wants or self.ran_ns != earlier.ran_ns


def beats_of(pids: Iterable[int]) -> dict[int, Beat]:
    """A reading of each of these processes of this machine that is a worker of Ray's.

    Others are left out, and so are all where the system keeps no such account.
    """
    found = {pid: _beat_of(_PROCESSES / str(pid)) for pid in pids}
    return {pid: beat for pid, beat in found.items() if beat is not None}


class HeartReader:
    """`beats_of` on another node, as an actor there."""

    def beats(self, pids: list[int]) -> dict[int, Beat]:
        """See `beats_of`."""
        return beats_of(pids)


def _beat_of(process: Path) -> Beat | None:
    try:
        # Another may have the number by now, or here: a container numbers its own processes.
        if not (process / "comm").read_text().startswith(_RAYS_NAME):
            return None
        halted = _state_of(process) in "Tt"
        threads = list((process / "task").iterdir())
    except OSError:
        return None
    states, ran = set(), []
    for thread in threads:
        with suppress(OSError):  # it has ended meanwhile
            states.add(_state_of(thread))
            ran.append(int((thread / "schedstat").read_text().split()[0]))
    # A kernel that does not count nanoseconds leaves only what is held to be told.
    return Beat(sum(ran), bool(states & set("RD")) or not (ran or halted), halted)


def _state_of(process: Path) -> str:
    """The letter that the kernel has for it: R runs or could, D waits for a disk, T is held..."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]
