"""A pool of rank processes for a test session; independent of the functions that it runs."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_policy.coordination.rendezvous import reserved_port
from tests.rank_process import dumps, environment, serve

START_TIMEOUT = RUN_TIMEOUT = 600.0  # for what hangs; on a machine under load all takes long
GRACE = 1.0  # seconds that the other ranks get to report after one has failed
LOG_TAIL = 4000  # characters of a rank's output that a failure shows
ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # the name of a container need not resolve
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message holds what each of them left behind."""


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    pipe: Connection
    log: Path


@dataclass(frozen=True)
class _Outcome:
    kind: str  # "ok", "raised" or "died"
    value: Any  # pickled result, traceback, or how it died


class RankPool:
    """Rank processes that stay alive between runs; a failure ends all, and the next run starts new.

    Without `on_gpus` the ranks see no GPU and fork from a server that has imported everything slow.
    With `on_gpus` they see every GPU and are spawned, since a GPU context does not survive a fork.
    `preload` is what the server imports. A process has one server: that of its first pool.
    """

    def __init__(self, *, on_gpus: bool = False, preload: str = "tests.preload") -> None:
        self._environment = ENVIRONMENT if on_gpus else {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
        self._context = mp.get_context("spawn" if on_gpus else "forkserver")
        self._context.set_forkserver_preload([preload])
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks: list[_Rank] = []
        atexit.register(self.end)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks that are alive between runs, in rank order."""
        return tuple(rank.process.pid or 0 for rank in self._ranks)

    def run(
        self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT
    ) -> list[Any]:
        """Call `fn(*args)` on ranks 0..world-1 and return their results in rank order.

        `fn` is a function of a module. It finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
        MASTER_PORT in its environment and joins a process group itself where it needs one; the pool
        destroys what it left. Arguments and results travel by value. RankFailure if a rank raises,
        dies, or has not returned after `timeout` seconds.
        """
        call = dumps((fn, args))
        try:
            self._start(world)
            ranks = self._ranks[:world]
            said_before = [rank.log.stat().st_size for rank in ranks]
            with reserved_port() as port:
                for index, rank in enumerate(ranks):
                    rank.pipe.send(("run", _rendezvous(index, world, port), call))
                outcomes = _collect(ranks, time.monotonic() + timeout)
                _check(ranks, outcomes, said_before, timeout)
                # Only now: rank 0 leaving earlier would take the store away from the others.
                for rank in ranks:
                    rank.pipe.send(("leave",))
                left = _collect(ranks, time.monotonic() + timeout)
                _check(ranks, left, said_before, timeout)
        except BaseException:
            self.end()
            raise
        return [pickle.loads(outcomes[index].value) for index in range(world)]

    def end(self) -> None:
        """End every rank process of this pool, by its id; a later run starts new ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join(10)
            rank.pipe.close()

    def _start(self, world: int) -> None:
        new = range(len(self._ranks), world)
        for index in new:
            ours, theirs = self._context.Pipe()
            log = Path(self._logs.name, f"rank{index}.log")
            log.write_bytes(b"")
            process = self._context.Process(
                target=serve, args=(theirs, str(log)), name=f"rank{index}"
            )
            with environment(self._environment):
                process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, log))
        started = [self._ranks[index] for index in new]
        outcomes = _collect(started, time.monotonic() + START_TIMEOUT)
        _check(started, outcomes, [0] * len(started), START_TIMEOUT)


def _rendezvous(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _collect(ranks: list[_Rank], deadline: float) -> dict[int, _Outcome]:
    """What the ranks report until `deadline`, or until shortly after the first that failed."""
    outcomes: dict[int, _Outcome] = {}
    waiting = {rank.pipe: index for index, rank in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            index = waiting.pop(pipe)
            try:
                outcomes[index] = _Outcome(*pipe.recv())
            except (EOFError, OSError):
                ranks[index].process.join(10)
                outcomes[index] = _Outcome("died", f"exit code {ranks[index].process.exitcode}")
            if outcomes[index].kind != "ok":
                deadline = min(deadline, time.monotonic() + GRACE)
    return outcomes


def _check(
    ranks: list[_Rank], outcomes: dict[int, _Outcome], said_before: list[int], timeout: float
) -> None:
    failed = {index: outcome for index, outcome in outcomes.items() if outcome.kind != "ok"}
    silent = [index for index in range(len(ranks)) if index not in outcomes]
    if not failed and not silent:
        return
    report = [f"{ranks[i].process.name} {o.kind}: {o.value}" for i, o in failed.items()]
    _ask_for_stacks([ranks[i] for i in silent])
    why = "had not finished when another failed" if failed else f"hung: no result in {timeout:g} s"
    report += [f"{ranks[i].process.name} {why}" for i in silent]
    for index in [*failed, *silent]:
        said = ranks[index].log.read_bytes()[said_before[index] :].decode(errors="replace")
        if said.strip():
            name = ranks[index].process.name
            report.append(f"--- output of {name} ---\n{said[-LOG_TAIL:].strip()}")
    raise RankFailure("\n".join(report))


def _ask_for_stacks(ranks: list[_Rank]) -> None:
    for rank in ranks:
        assert rank.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # the handlers write, in C, whatever the threads wait for
