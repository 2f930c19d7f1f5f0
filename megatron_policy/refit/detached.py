"""Refits that go on while the policy trains: what this rank sends is copied to host memory, and a
thread delivers it from there.

Every rank copies what it would send, its own stream, before `begin` returns. Gathering and delivery
are those of any refit, and run in a thread of each rank. They meet nothing of what the policy does
meanwhile: they read the copy, and have operations and process groups of their own. Two threads in
one group would mix their collectives. On GPUs these groups exchange host memory (gloo, not NCCL):
kernels of two NCCL groups, started in another order on each rank, can wait for each other forever,
and where tensor parallelism has kernels start in the order of their launches they would. A
broadcast to engines is no such wait: they read it whatever the policy computes.

To gather at once and only deliver later would need no other groups, but the memory of the whole
model on every rank that sends, in place of a share on each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from megatron_policy.coordination.operation import REFITS
from megatron_policy.device import make_side_stream, on_side_stream, queued
from megatron_policy.errors import RefitError
from megatron_policy.memory.pinned_pool import PinnedMemoryPool
from megatron_policy.refit.delivery import Transport, carry_out
from megatron_policy.refit.exporter import Exporter
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.ranks import RefitRanks

_log = logging.getLogger(__name__)


class Source(Protocol):
    """Copies what a refit sends, and then sends it."""

    def begin(
        self,
        exporter: Exporter,
        ranks: RefitRanks,
        pool: PinnedMemoryPool,
        step: int,
        *,
        beside: bool,
    ) -> Callable[[], RefitManifest]:
        """Copy, and return what sends the weights as they are now, after `step` optimizer steps,
        with those `ranks`, which exchange host memory. With `beside`, where all that it needs is in
        the pool, the weights can change meanwhile. Both are collective over all ranks; RefitError
        on all of them if any failed.
        """


class WholeSets:
    """All weights, over a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def begin(
        self,
        exporter: Exporter,
        ranks: RefitRanks,
        pool: PinnedMemoryPool,
        step: int,
        *,
        beside: bool,
    ) -> Callable[[], RefitManifest]:
        """See `Source`."""
        began, plan = time.perf_counter(), self._transport.plan(exporter)
        planned = None if plan is None else plan.in_rounds
        frozen, failure = exporter, None
        ranks.begin()
        try:
            frozen = exporter.freeze(planned, ranks, pool)
        except Exception as error:
            failure = error
        ranks.agree(failure)
        frozen.begin()
        return lambda: carry_out(frozen, self._transport, planned, step, began)


class DetachedRefits:
    """One rank's end of detached refits, of which one at most is under way. The host memory is kept
    for the next one.
    """

    def __init__(self) -> None:
        self._pool = PinnedMemoryPool()
        self._stream = make_side_stream()
        self._ranks: RefitRanks | None = None
        self._thread: threading.Thread | None = None
        self._step = 0
        self._sent: RefitManifest | None = None
        self._failure: Exception | None = None

    def deliver(self, exporter: Exporter, source: Source, step: int) -> RefitManifest:
        """Send, and return when that is done. Collective, after `finish`."""
        return source.begin(exporter, self._join(exporter), self._pool, step, beside=False)()

    def begin(self, exporter: Exporter, source: Source, step: int) -> None:
        """Begin to send what the exporter exports, as it is after `step` optimizer steps. When it
        returns, the weights can change or move.

        Collective, after `finish`. RefitError on all ranks if one has no memory for its copy.
        """
        assert self._thread is None, "one is under way"
        deliver = source.begin(exporter, self._join(exporter), self._pool, step, beside=True)
        point = queued()

        def send() -> RefitManifest:
            with on_side_stream(point, self._stream):
                return deliver()

        self._step = step
        # A process that fails must not wait for an engine before it ends.
        self._thread = threading.Thread(
            target=self._run, args=(send,), name="detached-refit", daemon=True
        )
        self._thread.start()

    def finish(self) -> RefitManifest | None:
        """Wait for the refit under way; return what this rank has sent. RefitError, on every rank,
        if it has failed. None if none is under way.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        (sent, failure), self._sent, self._failure = (self._sent, self._failure), None, None
        if failure is not None:
            raise RefitError(f"the refit of step {self._step} has failed: {failure}") from failure
        return sent

    def close(self) -> None:
        """Leave the process groups, after `finish`."""
        if self._ranks is not None:
            self._ranks.close()

    def _join(self, exporter: Exporter) -> RefitRanks:
        """The ranks that exchange host memory; what was copied for the last refit can go."""
        if self._ranks is None:
            self._ranks = exporter.ranks.apart()
        self._pool.reset()
        return self._ranks

    def _run(self, send: Callable[[], RefitManifest]) -> None:
        try:
            self._sent = send()
        except BaseException as error:  # a thread that ends so has sent nothing either
            self._failure = REFITS.wrap(error)
            # Logged too, as the process may end before anyone asks.
            _log.error("the refit of step %d beside training has failed: %s", self._step, error)
