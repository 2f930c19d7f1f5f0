"""One Ray actor per rank: starts, calls and ends the actors, and detects failures."""

from __future__ import annotations

import math
import os
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pickle import PicklingError
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_policy.coordination.timeouts import WORKER_TIMEOUT_S
from megatron_policy.errors import ConfigError, WorkerError
from megatron_policy.parallel.topology import Topology
from megatron_policy.workers.cluster.environment import make_worker_env
from megatron_policy.workers.cluster.failure import Failure, find_cause, is_refusal, make_error
from megatron_policy.workers.cluster.processes import ProcessLocation, locate, wait_until_gone
from megatron_policy.workers.cluster.virtual_cluster import RayVirtualCluster, Slot
from megatron_policy.workers.cluster.watch import Watch, watch_in_background

# Workers that were asked to shut down get this long before they are killed.
SHUTDOWN_S = 5.0


class WorkerGroup:
    """One actor of `actor_class` per rank of `topology`, in the slots of `cluster`.

    The constructor returns when every worker has been constructed, or raises the first error
    and leaves no process. `actor_class` is a class decorated with `ray.remote`; each worker is
    constructed with `kwargs`. If a worker has a method `shutdown`, it is called before it is ended.

    Calls take keyword arguments only; each value is sent once, however many ranks need it. If a
    worker raises or dies, the call raises (see `failure.make_error`) instead of waiting for ranks
    that are stuck in a collective with it; then the group is broken and only `shutdown` works. A
    refusal that leaves no rank stuck, such as a BatchError from all ranks of a replica, leaves the
    group usable. A worker whose process is stopped, or whose node does not answer, for `timeout_s`
    seconds of a call counts as dead and is killed; a working one may take as long as it needs.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        actor_class: Any,
        topology: Topology,
        *,
        kwargs: Mapping[str, Any] | None = None,
        env_vars: Mapping[str, str] | None = None,
        name: str = "workers",
        workers_per_node: int | Sequence[int] | None = None,
        timeout_s: float = WORKER_TIMEOUT_S,
    ) -> None:
        self.topology = topology
        self.name = f"{name}-{uuid.uuid4().hex[:6]}"
        self._cluster = cluster
        self._workers: list[Any] = []
        self._locations: tuple[ProcessLocation, ...] = ()
        self._broken: WorkerError | None = None
        self._watch = Watch(timeout_s)
        slots = cluster.slots(workers_per_node)
        if len(slots) != topology.world_size:
            raise ConfigError(
                f"the layout has {topology.world_size} ranks ({topology}), but the cluster gives "
                f"{len(slots)} workers; make them equal"
            )
        cluster.claim(self.name)
        try:
            self._start(actor_class, slots, dict(kwargs or {}), dict(env_vars or {}))
            self._watch.follow(self._workers)
            refs = [worker.__ray_call__.remote(locate) for worker in self._workers]
            self._locations = tuple(self.collect("constructor", refs))
            self._watch.set_locations(self._locations)
        except BaseException:
            self.kill()
            raise

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.topology.world_size

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of every rank's worker, on its own node."""
        return tuple(location.pid for location in self._locations)

    @property
    def usable(self) -> bool:
        """Whether workers can be called: the group is not broken or shut down, and Ray runs."""
        return bool(self._workers) and self._broken is None and ray.is_initialized()

    def run_all(self, method: str, /, **kwargs: Any) -> list[Any]:
        """Call `method` on every worker with the same arguments; return results in rank order."""
        return self.collect(method, self.submit_all(method, **kwargs))

    def run_sharded(self, method: str, /, *, data: Sequence[Any], **kwargs: Any) -> list[Any]:
        """Call `method` with `data[i]` on all ranks of data-parallel index i; a result for each i.

        The result is that of the rank of i with pipeline, context and tensor index 0.
        """
        self._check_usable()
        if len(data) != self.topology.dp:
            raise ConfigError(
                f"{method}: {len(data)} shards for {self.topology.dp} data-parallel ranks; "
                "give one shard each"
            )
        shards, common = [put("data", shard) for shard in data], put_all(kwargs)
        refs = [
            getattr(worker, method).remote(data=shards[self.topology.coords(rank).dp], **common)
            for rank, worker in enumerate(self._workers)
        ]
        return self.collect(method, refs, self.topology.reporters())

    def submit_all(self, method: str, /, **kwargs: Any) -> list[ray.ObjectRef]:
        """Start `method` on every worker; return Ray's futures in rank order without waiting."""
        self._check_usable()
        common = put_all(kwargs)
        return [getattr(worker, method).remote(**common) for worker in self._workers]

    def futures(self, method: str, /, **kwargs: Any) -> list[ray.ObjectRef]:
        """`submit_all` for a caller that waits by itself: a worker that stops meanwhile is killed,
        so that its future raises Ray's error, in which the worker's name contains the rank.
        """
        refs = self.submit_all(method, **kwargs)
        watch_in_background(
            refs, self._watch, lambda group, lost: group._give_up(method, lost), self
        )
        return refs

    def collect(
        self, call: str, refs: Sequence[ray.ObjectRef], wanted: Collection[int] | None = None
    ) -> list[Any]:
        """Wait for what `submit_all` returned: results of the `wanted` ranks (None: all), in order.

        Raises the error of the rank to blame, or a WorkerError; `call` names the call in messages.
        """
        ranks = range(len(refs)) if wanted is None else wanted
        values, failures, running = gather(refs, ranks, self._watch)
        if not failures:
            return [values[rank] for rank in ranks]
        error = make_error(call, failures, running)
        replicas = [self.topology.coords(rank).dp for rank in range(self.world_size)]
        if not is_refusal(failures, running, replicas):
            self._give_up(call, failures)
        raise error

    def shutdown(self) -> bool:
        """End every worker, by force if it does not exit within seconds; can be called again.

        A broken group is killed at once. Returns whether all processes are known to be gone.
        """
        if self.usable:
            # Those that cannot shut down are killed.
            with suppress(RayError, WorkerError, AttributeError):
                refs = self.submit_all("shutdown")
                ray.wait(refs, num_returns=self.world_size, timeout=SHUTDOWN_S)
        return self.kill()

    def kill(self) -> bool:
        """Kill every worker and wait until its process is gone; can be called again."""
        workers, self._workers = self._workers, []
        self._cluster.release(self.name)
        if not workers or not ray.is_initialized():
            return True
        self._watch.close()
        for worker in workers:
            ray.kill(worker, no_restart=True)
        return wait_until_gone(workers, self._locations)

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_workers", None):
            self.kill()

    def _start(
        self,
        actor_class: Any,
        slots: Sequence[Slot],
        kwargs: dict[str, Any],
        env_vars: dict[str, str],
    ) -> None:
        address, port = self._cluster.get_master_address_and_port()
        shared = put_all(kwargs)
        for rank, slot in enumerate(slots):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": slot.bundle,
                "WORLD_SIZE": len(slots),
                "NODE_RANK": slot.node,
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            }
            # Its node is taken to have as many cores as this one.
            threads = (os.cpu_count() or 1) // sum(each.node == slot.node for each in slots)
            env = make_worker_env(
                variables, env_vars, accelerated=self._cluster.use_gpus, threads=max(1, threads)
            )
            options = actor_class.options(
                name=f"{self.name} rank {rank}",  # shown in Ray's own errors
                num_cpus=self._cluster.cpus_per_worker,
                num_gpus=self._cluster.gpus_per_worker,
                scheduling_strategy=slot.strategy(),
                runtime_env={"env_vars": env},
            )
            self._workers.append(options.remote(**shared))

    def _give_up(self, call: str, failures: Sequence[Failure]) -> None:
        """Mark the group as broken. A lost worker is killed, so that it does not resume."""
        blamed = find_cause(failures)
        self._broken = WorkerError(
            f"{call}: {blamed.headline()}\n{blamed.text}", rank=blamed.rank, cause=blamed.text
        )
        for failure in failures:
            if failure.lost and self._workers:
                ray.kill(self._workers[failure.rank], no_restart=True)

    def _check_usable(self) -> None:
        if not self._workers:
            raise WorkerError(f"the worker group {self.name} has been shut down; make a new one")
        if self._broken is not None:
            raise WorkerError(
                f"the worker group {self.name} is broken, call shutdown() and make a new one. "
                f"It failed in {self._broken}",
                rank=self._broken.rank,
                cause=self._broken.cause,
            ) from self._broken


# After a failure the others get this long to report: an exception may be the consequence of a death
# that Ray reports later.
GRACE_S = 1.5
GRACE_AFTER_DEATH_S = 0.5
# A refusal does no harm unless a rank is stuck: give slower ranks time to show that they are not.
GRACE_AFTER_REFUSAL_S = 5.0


def gather(
    refs: Sequence[ray.ObjectRef], wanted: Collection[int], watch: Watch
) -> tuple[dict[int, Any], list[Failure], list[int]]:
    """Wait for all, or until shortly after the first failure, which `watch` may also find.

    Returns the `wanted` results by rank, the failures in time order, and the ranks still busy.
    """
    pending = dict(enumerate(refs))
    values: dict[int, Any] = {}
    failures: list[Failure] = []
    deadline = math.inf

    def note(failure: Failure) -> None:
        nonlocal deadline
        failures.append(failure)
        grace = GRACE_AFTER_REFUSAL_S if failure.refused else GRACE_S
        grace = GRACE_AFTER_DEATH_S if failure.died else grace
        deadline = min(deadline, time.monotonic() + grace)

    while pending:
        left = max(0.0, deadline - time.monotonic())
        timeout = min(left, watch.interval_s)
        ready, _ = ray.wait(list(pending.values()), num_returns=1, timeout=timeout)
        if not ready and left == 0.0:
            break
        for rank in [rank for rank, ref in pending.items() if ref in ready]:
            try:
                value = ray.get(pending.pop(rank))
            except RayError as error:
                note(Failure.of(rank, error))
            else:
                if rank in wanted:
                    values[rank] = value
        watch.look()
        for failure in watch.find_lost(pending):
            del pending[failure.rank]
            note(failure)
    for failure in watch.find_halted(pending) if failures else ():
        del pending[failure.rank]
        failures.append(failure)
    return values, failures, sorted(pending)


def put_all(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, all but plain scalars in the object store, so that each is sent once."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else put(name, value)
        for name, value in kwargs.items()
    }


def put(name: str, value: Any) -> ray.ObjectRef:
    """Put the argument `name` into the object store; ConfigError if it cannot be pickled."""
    try:
        return ray.put(value)
    except (TypeError, PicklingError) as error:
        raise ConfigError(
            f"{name}, a {type(value).__name__}, cannot be sent to the workers: {str(error).strip()}"
        ) from error
