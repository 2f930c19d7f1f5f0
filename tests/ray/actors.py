"""Small worker classes with real processes behind them, for the tests of the worker group, without
a model.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from megatron_policy.errors import ConfigError

if TYPE_CHECKING:
    from megatron_policy.workers import WorkerGroup


LONG_S = 8
"""What a worker takes for long work."""


class Unpicklable(Exception):
    """An error that cannot leave its process."""

    def __reduce__(self) -> Any:
        raise TypeError("this stays here")


class PlainWorker:
    """Answers, raises, sleeps, stops or dies as it is told; leaves its process id in `diary` if
    there is one.
    """

    def __init__(
        self,
        diary: str = "",
        refuse_on: int | None = None,
        wrap: bool = False,
        die_on: int | None = None,
        stop_on: int | None = None,
        join: bool = False,
    ) -> None:
        self.rank = int(os.environ["RANK"])
        if diary:
            (Path(diary) / f"{self.rank}-{os.getpid()}").touch()
        if self.rank == refuse_on:
            refusal = ConfigError(f"rank {self.rank} does not like this\nsecond line")
            if wrap:
                raise RuntimeError("and that is why") from refusal
            raise refusal
        if self.rank == die_on:
            self._die()
        if self.rank == stop_on:
            self._stop()
        if join:
            import torch.distributed

            torch.distributed.init_process_group("gloo")

    def env(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def echo(self, data: Any, more: Any = None) -> tuple[int, Any, Any]:
        self.last = data
        return self.rank, data, more

    def recall(self) -> Any:
        return self.last

    def act(self, how: dict[int, str], others: str = "answer", data: Any = None) -> str:
        """Do `how[rank]`, or what `others` do."""
        return getattr(self, f"_{how.get(self.rank, others)}")()

    def shutdown(self) -> bool:
        return True

    def _answer(self) -> str:
        return f"rank {self.rank} is fine"

    def _sleep(self) -> str:
        time.sleep(600)
        return "woke up"

    def _slowly(self) -> str:
        time.sleep(2)
        return self._answer()

    def _reduce(self) -> str:
        import torch.distributed

        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return f"{total.item():g} ranks met"

    def _raise(self) -> str:
        raise RuntimeError(f"the reactor of rank {self.rank} is too hot")

    def _late_raise(self) -> str:
        time.sleep(2)
        return self._raise()

    def _refuse(self) -> str:
        raise ConfigError(f"rank {self.rank} cannot do that; ask for less")

    def _hide(self) -> str:
        raise Unpicklable("nobody may see the reactor")

    def _die(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return "not reached"

    def _stop(self) -> str:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "goes on"

    def _hold(self) -> str:
        # As an extension does that holds Python's lock while it waits.
        ctypes.PyDLL(None).sleep(LONG_S)
        return self._answer()

    def _nap(self) -> str:
        time.sleep(LONG_S)
        return self._answer()

    def _compute(self) -> str:
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            pass
        return self._answer()

    def _late(self) -> str:
        time.sleep(1)
        return self._die()


Worker = ray.remote(PlainWorker)
GroupMaker = Callable[..., "WorkerGroup"]


@contextmanager
def promptly(within_s: float = 120.0) -> Iterator[None]:
    """What is promised of every failure: the driver hears of it in time; usually in a second or
    two.
    """
    start = time.monotonic()
    yield
    assert time.monotonic() - start < within_s


def still_running(diary: Path, within_s: float = 10.0) -> list[int]:
    """Process ids in the diary that still exist after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        pids = [int(entry.name.split("-")[1]) for entry in diary.iterdir()]
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


def wait_until_stopped(pid: int, within_s: float = 120.0) -> None:
    """Until a signal has stopped every thread of that process."""
    deadline = time.monotonic() + within_s
    stats = Path(f"/proc/{pid}/task").glob
    while {each.read_text().rpartition(")")[2].split()[0] for each in stats("*/stat")} != {"T"}:
        assert time.monotonic() < deadline, f"process {pid} is not stopped"
        time.sleep(0.02)
