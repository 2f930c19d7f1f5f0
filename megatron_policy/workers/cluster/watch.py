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
from megatron_policy.workers.cluster.heartbeat import Beat, HeartReader, beats_of
from megatron_policy.workers.cluster.processes import ProcessLocation, place_in_books

Owner = TypeVar("Owner")

log = logging.getLogger("megatron_policy.workers")

_LOOKS = 8  # checks within the limit
_REMEDY = "The key worker_timeout_s sets how long the driver waits for it."


@dataclass
class _Heart:
    """What is known about one rank; `quiet_s` counts from its last beat."""

    place: ProcessLocation | None = None
    beat: Beat | None = None
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
        self._hearts: list[_Heart] = []
        self._posts: dict[str, _HerePost | _FarPost] = {}
        self._looked, self._lock = time.monotonic(), threading.Lock()

    def follow(self, workers: Sequence[Any]) -> None:
        """Watch these actors, given in rank order, even while they are being constructed."""
        self._workers, self._hearts = tuple(workers), [_Heart() for _ in workers]

    def placed(self, places: Sequence[ProcessLocation]) -> None:
        """Set where each worker says that it runs."""
        for heart, place in zip(self._hearts, places, strict=True):
            heart.place = place

    def look(self) -> None:
        """Take readings if they are due; call this at least every `interval_s` seconds."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < self.interval_s / 2:
                return
            passed, self._looked = min(now - self._looked, 2 * self.interval_s), now
            for heart, worker in zip(self._hearts, self._workers, strict=True):
                heart.place = heart.place or place_in_books(worker)
            for node in {heart.place.node for heart in self._hearts if heart.place}:
                self._look_at(node, passed)

    def lost(self, ranks: Collection[int]) -> list[Failure]:
        """The failures of those `ranks` that have stopped or cannot be reached."""
        with self._lock:
            found = [self._loss(rank) for rank in range(len(self._hearts)) if rank in ranks]
        return [failure for failure in found if failure is not None]

    def held(self, ranks: Collection[int]) -> list[Failure]:
        """The failures of those `ranks` that a signal or a debugger has stopped, however recently:
        they explain failures of others.
        """
        with self._lock:
            return [
                self._stopped(rank, heart)
                for rank, heart in enumerate(self._hearts)
                if rank in ranks and heart.quiet_s > 0 and heart.beat and heart.beat.halted
            ]

    def close(self) -> None:
        """End the actors that were started on other nodes."""
        with self._lock:
            posts, self._posts, self._hearts = self._posts, {}, []
            self._workers = ()
        for post in posts.values():
            post.close()

    def _look_at(self, node: str, passed: float) -> None:
        if node not in self._posts:
            here = ray.get_runtime_context().get_node_id()
            self._posts[node] = _HerePost() if node == here else _FarPost(node)
        hearts = [heart for heart in self._hearts if heart.place and heart.place.node == node]
        post = self._posts[node]
        reading = post.read([heart.place.pid for heart in hearts if heart.place], passed)
        if reading is None:
            return
        beats, since = reading
        for heart in hearts:
            beat = beats.get(heart.place.pid) if heart.place else None
            # Ray itself reports a process that is gone; this is about those that exist.
            still = beat and heart.beat and not beat.follows(heart.beat)
            heart.quiet_s = heart.quiet_s + since if still else 0.0
            heart.beat = beat

    def _loss(self, rank: int) -> Failure | None:
        heart = self._hearts[rank]
        if heart.place is None:
            return None
        post = self._posts.get(heart.place.node)
        if post is not None and post.quiet_s >= self.limit_s:
            return Failure.loss(
                rank,
                "cannot be reached",
                f"Its node, {heart.place.address}, where it is process {heart.place.pid}, has not "
                f"answered for {post.quiet_s:.0f} s. Look at that machine and its network. "
                f"{_REMEDY}",
            )
        return self._stopped(rank, heart) if heart.quiet_s >= self.limit_s else None

    def _stopped(self, rank: int, heart: _Heart) -> Failure:
        assert heart.place is not None
        return Failure.loss(
            rank,
            "has stopped",
            f"Its process {heart.place.pid} on {heart.place.address} exists and has not run for "
            f"{heart.quiet_s:.0f} s: it was stopped by a signal (SIGSTOP) or a debugger, or its "
            f"container is frozen. {_REMEDY}",
        )


class _HerePost:
    """Readings of the driver's own node."""

    quiet_s = 0.0

    def read(self, pids: list[int], passed: float) -> tuple[dict[int, Beat], float]:
        """The readings, and the seconds since the previous ones."""
        return beats_of(pids), passed

    def close(self) -> None:
        """Do nothing: nothing was started."""


class _FarPost:
    """Readings of another node, by an actor there; `quiet_s` is the time since it answered."""

    def __init__(self, node: str) -> None:
        self.quiet_s, self._since = 0.0, 0.0
        self._answered, self._asked = False, None
        self._reader: Any = (
            ray.remote(HeartReader)
            .options(
                num_cpus=0,
                max_restarts=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
            )
            .remote()
        )

    def read(self, pids: list[int], passed: float) -> tuple[dict[int, Beat], float] | None:
        """The same; None if no answer has come since the last call. Requests the next."""
        self._since += passed
        # A new actor answers only once its Python has started.
        self.quiet_s += passed if self._answered else 0.0
        beats = self._answer()
        if beats is None and self._asked is not None:
            return None
        self._asked = self._reader.beats.remote(pids)
        if beats is None:
            return None
        since, self._since = self._since, 0.0
        return beats, since

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._reader, no_restart=True)

    def _answer(self) -> dict[int, Beat] | None:
        if self._asked is None or not ray.wait([self._asked], timeout=0)[0]:
            return None
        asked, self._asked, self.quiet_s = self._asked, None, 0.0
        try:
            beats: dict[int, Beat] = ray.get(asked)
        except RayError:  # it died and is restarted, unless its node is gone: Ray reports that
            self._answered = False
            return None
        self._answered = True
        return beats


def stand_by(
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
