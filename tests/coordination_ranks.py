"""One of two ranks that play the parts of `coordination_parts` at once, each in a thread of its
own, while one of the ranks suffers a fault: what its process is sent.
"""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from tests.coordination_parts import (
    AGREEMENTS,
    GROUPS,
    HANG_S,
    LONG_S,
    REFITTING,
    REPEATED,
    SAVING,
    Part,
    Place,
    Suffer,
)

RAISES, IS_KILLED, IS_STOPPED, COMES_LATE, LEAVES = "raises", "killed", "stopped", "late", "leaves"
LATE_S = 1.0


class Leaving(BaseException):
    """A rank leaves without a message, as at an interrupt."""


_place: list[Place] = []
_parts: dict[str, Part] = {}
_heard: dict[str, str] = {}
_threads: list[threading.Thread] = []
_continued = threading.Event()


def join_store(port: int, host: bool = False) -> dist.Store:
    """A store whose host is at the port, or that this process hosts there."""
    timeout = timedelta(seconds=HANG_S)
    return dist.TCPStore("127.0.0.1", port, 2, host, timeout, wait_for_workers=False)


def host_store(port: int) -> None:
    """Host a store, and nothing else."""
    _place[:] = [Place(0, 0, LONG_S, join_store(port, host=True))]


def take_place(rank: int, port: int, culprit: int, timeout_s: float) -> None:
    """Meet the other rank, and be ready to play."""
    for things in (_place, _parts, _heard, _threads):
        things.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    _continued.clear()
    signal.signal(signal.SIGCONT, lambda *_: _continued.set())
    store = join_store(port, host=rank == 0)
    timeout = timedelta(seconds=HANG_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    _place.append(Place(rank, culprit, timeout_s, dist.distributed_c10d._get_default_store()))
    for part in (*SAVING, *REFITTING, *GROUPS, *AGREEMENTS):
        _parts[part.__name__] = part(_place[0])
    _place[0].set_timeouts(timeout_s)


def begin(fault: str) -> None:
    """Play all parts at once, on the rank that suffers the fault if there is one; return when each
    has come to where it suffers.
    """
    ready = {name: threading.Event() for name in _parts}

    def run(name: str) -> None:
        try:
            _play(name, lambda: (ready[name].set(), _suffer(fault)))
        finally:
            ready[name].set()

    for name in _parts:
        _heard[name] = "it hangs"
        _threads.append(threading.Thread(target=run, args=(name,), daemon=True))
        _threads[-1].start()
    for name, event in ready.items():
        assert event.wait(HANG_S), name


def finish() -> dict[str, str]:
    """What every part has returned or raised here."""
    deadline = time.monotonic() + HANG_S / 2
    while any(thread.is_alive() for thread in _threads) and time.monotonic() < deadline:
        time.sleep(0.02)  # not one long wait, under which no handler of a signal would run
    return dict(_heard)


def play_again() -> dict[str, str]:
    """The same of the parts that are repeated, one after another, with nothing amiss."""
    _place[0].set_timeouts(LONG_S)
    for part in REPEATED:
        _play(part.__name__, lambda: None)
    return {part.__name__: _heard[part.__name__] for part in REPEATED}


def _play(name: str, suffer: Suffer) -> None:
    try:
        _heard[name] = repr(_parts[name](suffer))
    except BaseException as error:
        _heard[name] = f"{type(error).__name__}: {error}"


def _suffer(fault: str) -> None:
    match fault:
        case "raises":
            raise RuntimeError("the cause")
        case "killed" | "stopped":  # by the test, and "stopped" until it lets this process go on
            _continued.wait()
        case "late":
            time.sleep(LATE_S)
        case "leaves":
            raise Leaving
        case _:
            assert not fault, fault
