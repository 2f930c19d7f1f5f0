"""Process groups for weights, apart from those of training: a broken one is simply made anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

from megatron_policy.coordination.timeouts import run_with_timeout
from megatron_policy.device.process_groups import private_group
from megatron_policy.errors import RefitError
from megatron_policy.parallel.topology import Coords, Topology

_GRACE_S = 0.5  # how much longer to wait than gloo: its message says more
_IN_TIME = 0.9  # of the timeout: an earlier failure is not a timeout


class BoundedProcessGroup:
    """Collectives of one group of processes, each bounded in time. `calls` counts them."""

    def __init__(
        self,
        name: str,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        leave: Callable[[], None] = lambda: None,
        *,
        on_host: bool = False,
    ) -> None:
        """Meet the other `size - 1` processes through `store`; `name` must be new to it. `leave` is
        called at `close`, when the store is no longer used. `on_host` exchanges host memory.
        """
        self.name, self.rank, self.size, self.calls = name, rank, size, 0
        self._store, self._leave = store, leave  # torch does not keep a store of Python's alive
        self._timeout_s = timeout_s
        self.watch: Callable[[], object] | None = None
        """Called now and then during a wait for host memory, which ends when it raises: gloo can
        miss that a process has left, and keeps the connections of one that has given up a wait.
        """
        self._group: Any = None
        self._under_way: WeakSet[PendingCollective] = WeakSet()
        if size > 1:
            self._group = self._bounded(
                lambda: private_group(
                    dist.PrefixStore(name, store), rank, size, timeout_s, on_host=on_host
                )
            )

    def broadcast(self, memory: Tensor, source: int) -> PendingCollective:
        """Copy the `memory` of rank `source` into that of all other ranks."""
        return self._start(lambda: self._group.broadcast(memory, source))

    def send(self, memory: Tensor, target: int) -> PendingCollective:
        """Send the `memory` to that rank alone, which calls `receive`."""
        return self._start(lambda: self._group.send([memory], target, 0))

    def receive(self, memory: Tensor, source: int) -> PendingCollective:
        """Fill the `memory` with what that rank sends."""
        return self._start(lambda: self._group.recv([memory], source, 0))

    def all_gather(self, memory: Tensor) -> PendingCollective:
        """In place: `memory` has `size` equal parts; part `rank` is this process's own."""
        own = memory.view(self.size, -1)[self.rank]
        return self._start(lambda: self._group._allgather_base(memory, own))

    def sum(self, memory: Tensor) -> PendingCollective:
        """In place; integers add modulo 2**bits."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        return self._start(lambda: self._group.allreduce([memory], options))

    def close(self, broken: bool = False) -> None:
        """Leave; `broken` if a collective can still be under way."""
        group, self._group = self._group, None
        for each in self._under_way:
            each.work = None  # gloo's would keep the connections, and the others would wait for us
        if broken and group is not None and hasattr(group, "abort"):
            group.abort()
        self._leave()

    def _start(self, begin: Callable[[], Any]) -> PendingCollective:
        if self.size == 1:
            return PendingCollective(self, None)
        assert self._group is not None, f"{self.name} is closed"
        self.calls += 1
        started = PendingCollective(self, self._bounded(begin))
        self._under_way.add(started)
        return started

    def _await(self, pending: PendingCollective, timeout: timedelta) -> None:
        # Frames have no work of their own, which an error that somebody keeps would keep.
        if self.watch is None or not isinstance(self._group, dist.ProcessGroupGloo):
            pending.work.wait(timeout)
            return
        limit_s = timeout.total_seconds() + _GRACE_S
        run_with_timeout(limit_s, lambda: pending.work.wait(timeout), self.watch)

    def _bounded(self, step: Callable[[], Any]) -> Any:
        """What `step` returns; a failure in it means that a process is slow, stopped or gone."""
        started = time.monotonic()
        try:
            return step()
        except RuntimeError as error:
            seconds = time.monotonic() - started
            if seconds < _IN_TIME * self._timeout_s:
                what = f"a process has left, or was ended, after {seconds:.1f} s"
            else:
                what = f"a process did not take part within {self._timeout_s:g} s, or is gone"
            raise RefitError(
                f"{self.name}: {what} ({str(error).splitlines()[0]}). Check its log; the next "
                "refit starts from scratch"
            ) from error


class PendingCollective:
    """A collective that has been started."""

    def __init__(self, channel: BoundedProcessGroup, work: Any) -> None:
        self._channel, self.work = channel, work

    def wait(self) -> None:
        """Wait until its memory can be used; RefitError after the group's timeout."""
        try:
            if self.work is not None:
                timeout = timedelta(seconds=self._channel._timeout_s)
                self._channel._bounded(partial(self._channel._await, self, timeout))
        finally:
            self.work = None


@dataclass(frozen=True)
class ProcessGroups:
    """A rank's groups for refits: its tensor-parallel peers, the ranks that hold a layer's experts
    between them, its pipeline peers.
    """

    tp: BoundedProcessGroup
    experts: BoundedProcessGroup
    pp: BoundedProcessGroup

    @classmethod
    def join(
        cls,
        name: str,
        store: dist.Store,
        sizes: Topology,
        at: Coords,
        timeout_s: float,
        *,
        on_host: bool = False,
    ) -> ProcessGroups:
        """Meet the other members of each; `name` must be new to the store. `on_host` is for weights
        in host memory.
        """
        of_experts = sizes.expert_coords(sizes.rank(at))

        def group(name_: str, rank: int, size: int) -> BoundedProcessGroup:
            whole_name = f"{name}/{name_}"
            return BoundedProcessGroup(whole_name, store, rank, size, timeout_s, on_host=on_host)

        return cls(
            tp=group(f"tp/{at.pp}.{at.dp}.{at.cp}", at.tp, sizes.tp),
            experts=group(
                f"experts/{at.pp}.{of_experts.edp}",
                of_experts.ep * sizes.expert_tp + of_experts.etp,
                sizes.ep * sizes.expert_tp if sizes.experts_apart else 1,
            ),
            pp=group(f"pp/{at.dp}.{at.cp}.{at.tp}", at.pp, sizes.pp),
        )

    def of(self, experts: bool) -> BoundedProcessGroup:
        """The ranks that hold experts between them, or all else."""
        return self.experts if experts else self.tp

    @property
    def calls(self) -> int:
        """Collective calls over them so far."""
        return self.tp.calls + self.experts.calls + self.pp.calls

    def close(self, broken: bool = False) -> None:
        """Leave them."""
        for group in (self.tp, self.experts, self.pp):
            group.close(broken)
