"""Delivers the weights to a transport: every rank takes part to the end, and all succeed or raise
together.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from megatron_policy.refit.buffers import BufferSlice
from megatron_policy.refit.digest import Digests, algorithm_for
from megatron_policy.refit.manifest import Form, RefitManifest, with_digests

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.plan import RefitPlan, RefitTensor

_log = logging.getLogger(__name__)


class TransportSession(Protocol):
    """One rank's end of a transport during one refit.

    Tensors are placed and filled in the plan's order, each filled before the next is placed. Any
    method may raise: this rank then sends nothing more, and all ranks raise in the end.
    """

    def place(self, tensor: RefitTensor) -> BufferSlice | None:
        """Where to write its elements; None if this rank does not need it. May wait until the
        other side has finished with memory that is reused.
        """

    def filled(self, tensor: RefitTensor, target: BufferSlice, /) -> None:
        """All its elements have been written to `target`, which `place` returned."""

    def finish(self, manifest: RefitManifest) -> None:
        """Send what is left, and return when the other side has accepted everything.

        `manifest` lists what was placed here. RefitError if it was refused.
        """

    def close(self) -> None:
        """Release memory, files and sockets; called once, on success and on failure."""


class Transport(Protocol):
    """The trainer's side of a transport."""

    def plan(self, exporter: Exporter) -> RefitPlan | None:
        """What is gathered on this rank; None if this rank's replica has nothing to do.

        Pure, and the same on all ranks that gather together.
        """

    def open(self, exporter: Exporter, plan: RefitPlan) -> TransportSession | None:
        """This rank's end; None if it only helps to gather. May raise."""


def deliver(exporter: Exporter, transport: Transport, step: int) -> RefitManifest:
    """Send what the exporter exports, as it is after `step` optimizer steps; return what this rank
    has sent, and how long it took.

    Collective over all ranks. RefitError on all of them if any failed; the policy is unharmed.
    """
    began = time.perf_counter()
    exporter.begin()
    return carry_out(exporter, transport, transport.plan(exporter), step, began)


def carry_out(
    exporter: Exporter, transport: Transport, plan: RefitPlan | None, step: int, began: float
) -> RefitManifest:
    """`deliver` what is planned, in an operation of the exporter's ranks that has begun."""
    delivery = _Delivery(transport, exporter, plan)
    try:
        if plan is not None:
            for tensor, target in exporter.stream(plan, delivery.place):
                delivery.filled(tensor, target)
        delivery.finish(step)
    finally:
        delivery.close()
    exporter.agree(delivery.failure)
    return replace(delivery.manifest(step), seconds=time.perf_counter() - began)


def explain_whole(exporter: Exporter, sent: RefitManifest, why: str) -> RefitManifest:
    """What was sent, all weights in place of what has changed, with the reason; rank 0 logs it."""
    if exporter.rank == 0:
        _log.info("the refit of step %d has sent all weights: %s", sent.step, why)
    return replace(sent, why_whole=why)


class _Delivery:
    """Calls a transport session until its first failure, which it records."""

    def __init__(self, transport: Transport, exporter: Exporter, plan: RefitPlan | None) -> None:
        self.failure: Exception | None = None
        self._session: TransportSession | None = None
        self._forms: dict[str, Form] = {}
        self._digests, self._model = Digests(algorithm_for(exporter.probe)), exporter.served_model
        if plan is not None:
            with self._attempting():
                self._session = transport.open(exporter, plan)

    def place(self, tensor: RefitTensor) -> BufferSlice | None:
        target: BufferSlice | None = None
        if self._session is not None and self.failure is None:
            with self._attempting():
                target = self._session.place(tensor)
        return target

    def filled(self, tensor: RefitTensor, target: BufferSlice | None) -> None:
        if target is None or self._session is None or self.failure is not None:
            return
        with self._attempting():
            self._forms[tensor.name] = tensor.shape, tensor.dtype
            self._digests.add(tensor.name, target.bytes(tensor.nbytes))
            self._session.filled(tensor, target)

    def finish(self, step: int) -> None:
        if self._session is not None and self.failure is None:
            with self._attempting():
                self._session.finish(self.manifest(step))

    def close(self) -> None:
        if self._session is not None:
            with self._attempting():
                self._session.close()

    def manifest(self, step: int) -> RefitManifest:
        sent = with_digests(self._forms, self._digests.read())
        return RefitManifest(step, self._digests.algorithm, sent, self._model)

    @contextmanager
    def _attempting(self) -> Iterator[None]:
        """Record the first exception of the body instead of letting it end this rank's part."""
        try:
            yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # would keep the released memory alive
            self.failure = self.failure or error
