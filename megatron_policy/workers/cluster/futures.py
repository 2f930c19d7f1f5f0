"""Watches workers whose results are awaited elsewhere."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import TypeVar

import ray

from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.workers.cluster.failure import Failure
from megatron_policy.workers.cluster.watch import Watch

Owner = TypeVar("Owner")

log = logging.getLogger("megatron_policy.workers")


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
                    log.error("%s and is ended. %s", failure.headline(), failure.text)
                give_up(owner, lost)
            del owner

    start_thread(threading.Thread(target=look, daemon=True, name="worker-watch"))
