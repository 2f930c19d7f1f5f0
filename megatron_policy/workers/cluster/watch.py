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
from megatron_policy.workers.cluster.environment import python_path
from megatron_policy.workers.cluster.failure import Failure
from megatron_policy.workers.cluster.process_activity import CpuReading, CpuTimeReader, readings_of
from megatron_policy.workers.cluster.processes import ProcessLocation, recorded_location

Owner = TypeVar("Owner")

log = logging.getLogger("megatron_policy.workers")

_LOOKS = 8  # checks within the limit
_REMEDY = "The key worker_timeout_s sets how long the driver waits for it."


@dataclass
class _WatchedWorker:
    """What is known about one rank; `quiet_s` counts from its last reading."""

    place: ProcessLocation | None = None
    reading: CpuReading | None = None
    quiet_s: float = 0.0


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

    def placed(self, places: Sequence[ProcessLocation]) -> None:
        """Set where each worker says that it runs."""
        for worker, place in zip(self._watched, places, strict=True):
            worker.place = place

    def look(self) -> None:
        """Take readings if they are due; call this at least every `interval_s` seconds."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < self.interval_s / 2:
                return
            passed, self._looked = min(now - self._looked, 2 * self.interval_s), now
            for worker, actor in zip(self._watched, self._workers, strict=True):
                worker.place = worker.place or recorded_location(actor)
            for node in {worker.place.node for worker in self._watched if worker.place}:
                self._look_at(node, passed)

    def lost(self, ranks: Collection[int]) -> list[Failure]:
        """The failures of those `ranks` that have stopped or cannot be reached."""
        with self._lock:
            found = [self._loss(rank) for rank in range(len(self._watched)) if rank in ranks]
        return [failure for failure in found if failure is not None]

    def held(self, ranks: Collection[int]) -> list[Failure]:
        """The failures of those `ranks` that a signal or a debugger has stopped, however recently:
        they explain failures of others.
        """
        with self._lock:
            return [
                self._stopped(rank, worker)
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

    def _look_at(self, node: str, passed: float) -> None:
        if node not in self._readers:
            here = ray.get_runtime_context().get_node_id()
            self._readers[node] = _LocalReader() if node == here else _RemoteReader(node)
        watched = [worker for worker in self._watched if worker.place and worker.place.node == node]
        reader = self._readers[node]
        answer = reader.read([worker.place.pid for worker in watched if worker.place], passed)
        if answer is None:
            return
        readings, since = answer
        for worker in watched:
            reading = readings.get(worker.place.pid) if worker.place else None
            # Ray itself reports a process that is gone; this is about those that exist.
            still = reading and worker.reading and not reading.follows(worker.reading)
            worker.quiet_s = worker.quiet_s + since if still else 0.0
            worker.reading = reading

    def _loss(self, rank: int) -> Failure | None:
        worker = self._watched[rank]
        if worker.place is None:
            return None
        reader = self._readers.get(worker.place.node)
        if reader is not None and reader.quiet_s >= self.limit_s:
            return Failure.loss(
                rank,
                "cannot be reached",
                f"Its node, {worker.place.address}, where it is process {worker.place.pid}, has "
                f"not answered for {reader.quiet_s:.0f} s. Look at that machine and its network. "
                f"{_REMEDY}",
            )
        return self._stopped(rank, worker) if worker.quiet_s >= self.limit_s else None

    def _stopped(self, rank: int, worker: _WatchedWorker) -> Failure:
        assert worker.place is not None
        return Failure.loss(
            rank,
            "has stopped",
            f"Its process {worker.place.pid} on {worker.place.address} exists and has not run for "
            f"{worker.quiet_s:.0f} s: it was stopped by a signal (SIGSTOP) or a debugger, or its "
            f"container is frozen. {_REMEDY}",
        )


class _LocalReader:
    """Readings of the driver's own node."""

    quiet_s = 0.0

    def read(self, pids: list[int], passed: float) -> tuple[dict[int, CpuReading], float]:
        """The readings, and the seconds since the previous ones."""
        return readings_of(pids), passed

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
                runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
            )
            .remote()
        )

    def read(self, pids: list[int], passed: float) -> tuple[dict[int, CpuReading], float] | None:
        """The same; None if no answer has come since the last call. Requests the next."""
        self._since += passed
        # A new actor answers only once its Python has started.
        self.quiet_s += passed if self._answered else 0.0
        readings = self._answer()
        if readings is None and self._asked is not None:
            return None
        self._asked = self._reader.readings.remote(pids)
        if readings is None:
            return None
        since, self._since = self._since, 0.0
        return readings, since

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._reader, no_restart=True)

    def _answer(self) -> dict[int, CpuReading] | None:
        if self._asked is None or not ray.wait([self._asked], timeout=0)[0]:
            return None
        asked, self._asked, self.quiet_s = self._asked, None, 0.0
        try:
            readings: dict[int, CpuReading] = ray.get(asked)
        except RayError:  # it died and is restarted, unless its node is gone: Ray reports that
            self._answered = False
            return None
        self._answered = True
        return readings


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
            if lost := watch.lost(waiting - given_up):
                given_up.update(failure.rank for failure in lost)
                for failure in lost:
                    log.error("%s and will be ended. %s", failure.headline(), failure.text)
                give_up(owner, lost)
            del owner

    start_thread(threading.Thread(target=look, daemon=True, name="worker-watch"))
