"""Detects workers that have stopped or cannot be reached, while their driver waits for them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.workers.cluster.environment import make_python_path
from megatron_policy.workers.cluster.failure import Failure
from megatron_policy.workers.cluster.processes import (
    CpuReading,
    CpuTimeReader,
    ProcessLocation,
    find_recorded_location,
    read_processes,
)

Owner = TypeVar("Owner")

log = logging.getLogger("megatron_policy.workers")

_LOOKS = 8  # checks within the limit
_REMEDY = "The key worker_timeout_s sets how long the driver waits for it."


@dataclass
class _WatchedWorker:
    """What is known about one rank; `quiet_s` counts from its last reading."""

    location: ProcessLocation | None = None
    reading: CpuReading | None = None
    quiet_s: float = 0.0

    def take(self, reading: CpuReading | None, since: float) -> None:
        """Count the seconds `since` the last reading as quiet if the process has not run."""
        # Ray itself reports a process that is gone; this is about those that exist.
        still = reading and self.reading and not reading.follows(self.reading)
        self.quiet_s = self.quiet_s + since if still else 0.0
        self.reading = reading


class Watch:
    """The driver's watch over the workers of one group.

    A worker that gets no CPU time on its node for `limit_s` seconds has stopped, and one whose node
    does not answer for that long is unreachable. How long its work takes does not matter. Only time
    in which the driver looks is counted, so that a driver that was itself stopped blames no worker.
    Thread-safe.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.interval_s = limit_s, limit_s / _LOOKS
        self._workers: Sequence[Any] = ()
        self._watched: list[_WatchedWorker] = []
        self._readers: dict[str, _LocalReader | _RemoteReader] = {}
        self._looked, self._lock = time.monotonic(), threading.Lock()

    def follow(self, workers: Sequence[Any]) -> None:
        """Watch these actors, given in rank order, even while they are being constructed."""
        self._workers, self._watched = tuple(workers), [_WatchedWorker() for _ in workers]

    def set_locations(self, locations: Sequence[ProcessLocation]) -> None:
        """Set where each worker says that it runs."""
        for worker, location in zip(self._watched, locations, strict=True):
            worker.location = location

    def look(self) -> None:
        """Take readings if they are due; call this at least every `interval_s` seconds."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < self.interval_s / 2:
                return
            passed, self._looked = min(now - self._looked, 2 * self.interval_s), now
            for worker, actor in zip(self._watched, self._workers, strict=True):
                worker.location = worker.location or find_recorded_location(actor)
            here = ray.get_runtime_context().get_node_id()
            for node in {worker.location.node for worker in self._watched if worker.location}:
                if node not in self._readers:
                    self._readers[node] = _LocalReader() if node == here else _RemoteReader(node)
                by_pid = {
                    worker.location.pid: worker
                    for worker in self._watched
                    if worker.location and worker.location.node == node
                }
                if answer := self._readers[node].read(list(by_pid), passed):
                    for pid, worker in by_pid.items():
                        worker.take(answer[0].get(pid), answer[1])

    def find_lost(self, ranks: Collection[int]) -> list[Failure]:
        """The failures of those `ranks` that have stopped or cannot be reached."""
        found = []
        with self._lock:
            for rank, worker in enumerate(self._watched):
                location = worker.location
                if rank not in ranks or location is None:
                    continue
                reader = self._readers.get(location.node)
                if reader is not None and reader.quiet_s >= self.limit_s:
                    where = f"{location.address}, where it is process {location.pid}"
                    quiet = (
                        f"Its node, {where}, has not answered for {reader.quiet_s:.0f} s. Look at "
                        f"that machine and its network. {_REMEDY}"
                    )
                    found.append(Failure.loss(rank, "cannot be reached", quiet))
                elif worker.quiet_s >= self.limit_s:
                    found.append(self._describe_stop(rank, worker))
        return found

    def find_halted(self, ranks: Collection[int]) -> list[Failure]:
        """The failures of those `ranks` that a signal or a debugger has stopped, however recently:
        they explain failures of others.
        """
        with self._lock:
            return [
                self._describe_stop(rank, worker)
                for rank, worker in enumerate(self._watched)
                if rank in ranks and worker.quiet_s > 0 and worker.reading and worker.reading.halted
            ]

    def close(self) -> None:
        """End the actors that were started on other nodes."""
        with self._lock:
            readers, self._readers, self._watched = self._readers, {}, []
            self._workers = ()
        for reader in readers.values():
            reader.close()

    def _describe_stop(self, rank: int, worker: _WatchedWorker) -> Failure:
        location = worker.location
        assert location is not None
        return Failure.loss(
            rank,
            "has stopped",
            f"Its process {location.pid} on {location.address} exists and has not run for "
            f"{worker.quiet_s:.0f} s: it was stopped by a signal (SIGSTOP) or a debugger, or its "
            f"container is frozen. {_REMEDY}",
        )


class _LocalReader:
    """Readings of the driver's own node."""

    quiet_s = 0.0

    def read(self, pids: list[int], passed: float) -> tuple[dict[int, CpuReading], float]:
        """The readings, and the seconds since the previous ones."""
        return read_processes(pids), passed

    def close(self) -> None:
        """Do nothing: nothing was started."""


class _RemoteReader:
    """Readings of another node, by an actor there; `quiet_s` is the time since it answered."""

    def __init__(self, node: str) -> None:
        self.quiet_s, self._since = 0.0, 0.0
        self._answered, self._asked = False, None
        self._reader: Any = (
            ray.remote(CpuTimeReader)
            .options(
                num_cpus=0,
                max_restarts=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": {"PYTHONPATH": make_python_path()}},
            )
            .remote()
        )

    def read(self, pids: list[int], passed: float) -> tuple[dict[int, CpuReading], float] | None:
        """The same; None if no answer has come since the last call. Requests the next."""
        self._since += passed
        # A new actor answers only once its Python has started.
        self.quiet_s += passed if self._answered else 0.0
        readings: dict[int, CpuReading] | None = None
        if self._asked is not None:
            if not ray.wait([self._asked], timeout=0)[0]:
                return None
            self.quiet_s, self._answered = 0.0, True
            try:
                readings = ray.get(self._asked)
            except RayError:  # it died and is restarted, unless its node is gone: Ray reports that
                self._answered = False
        self._asked = self._reader.readings.remote(pids)
        if readings is None:
            return None
        since, self._since = self._since, 0.0
        return readings, since

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._reader, no_restart=True)


def watch_in_background(
    refs: Sequence[ray.ObjectRef],
    watch: Watch,
    give_up: Callable[[Owner, Sequence[Failure]], None],
    owner: Owner,
) -> None:
    """Watch the ranks in a background thread until all have answered; `refs` are in rank order.
    Those that `watch` finds lost are logged and passed to `give_up`. The thread does not keep
    `owner` alive, and ends with it.
    """
    # Not Ray's own wait: it must not be running in a thread when the interpreter ends.
    answers = [ref.future() for ref in refs]
    living = weakref.ref(owner)

    def look() -> None:
        given_up: set[int] = set()
        while wait(answers, timeout=watch.interval_s).not_done:
            owner = living()
            if owner is None or not ray.is_initialized():
                return
            watch.look()
            waiting = {rank for rank, answer in enumerate(answers) if not answer.done()}
            if lost := watch.find_lost(waiting - given_up):
                given_up.update(failure.rank for failure in lost)
                for failure in lost:
                    log.error("%s and will be ended. %s", failure.headline(), failure.text)
                give_up(owner, lost)
            del owner

    start_thread(threading.Thread(target=look, daemon=True, name="worker-watch"))
