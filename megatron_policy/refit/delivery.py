"""Hands the weights to a sink: every rank takes part to the end, and all succeed or raise together.

Knows no transport.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from megatron_policy.refit.buffers import BufferSlice
from megatron_policy.refit.digest import algorithm_for, digest
from megatron_policy.refit.manifest import Manifest, Sent

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.plan import RefitPlan, RefitTensor


class TransportSession(Protocol):
    """One rank's end of a transport during one refit.

    Tensors are placed in the plan's order and filled in that order, each before the next is placed.
    Any method may raise: this rank then sends nothing more, and all ranks raise in the end.
    """

    def place(self, tensor: RefitTensor) -> BufferSlice | None:
        """Where its elements are to be written; None when this rank has no use for it. May wait for
        the other side to be done with memory that is used again.
        """

    def filled(self, tensor: RefitTensor, room: BufferSlice) -> None:
        """All its elements are there."""

    def finish(self, manifest: Manifest) -> None:
        """Nothing more comes: send what is left, and return when the other side has accepted all.

        `manifest` lists what was placed here. RefitError when it was refused.
        """

    def close(self) -> None:
        """Give back memory, files and sockets; called once, however it went."""


class Transport(Protocol):
    """A transport, from the side of the trainer."""

    def plan(self, exporter: Exporter) -> RefitPlan | None:
        """What is gathered on this rank; None where this rank's replica has nothing to do.

        Pure, and the same on all ranks that gather together.
        """

    def open(self, exporter: Exporter, plan: RefitPlan) -> TransportSession | None:
        """This rank's end; None where it only helps to gather. May raise."""


def deliver(exporter: Exporter, sink: Transport, step: int) -> Manifest:
    """Send all weights, as they are after `step` optimizer steps; what this rank has sent.

    Collective over all ranks. RefitError on all of them when any failed; the policy is unharmed.
    """
    exporter.begin()
    plan = sink.plan(exporter)
    delivery = _Delivery(sink, exporter, plan)
    try:
        if plan is not None:
            for tensor, room in exporter.stream(plan, delivery.place):
                delivery.filled(tensor, room)
        delivery.finish(step)
    finally:
        delivery.close()
    exporter.agree(delivery.failure)
    return delivery.manifest(step)


class _Delivery:
    """Calls an session until it fails for the first time, and remembers that failure."""

    def __init__(self, sink: Transport, exporter: Exporter, plan: RefitPlan | None) -> None:
        self.failure: Exception | None = None
        self._session: TransportSession | None = None
        self._sent: dict[str, Sent] = {}
        self._algorithm = algorithm_for(exporter.probe)
        if plan is not None:
            with self._attempt():
                self._session = sink.open(exporter, plan)

    def place(self, tensor: RefitTensor) -> BufferSlice | None:
        room: BufferSlice | None = None
        if self._session is not None and self.failure is None:
            with self._attempt():
                room = self._session.place(tensor)
        return room

    def filled(self, tensor: RefitTensor, room: BufferSlice | None) -> None:
        if room is None or self._session is None or self.failure is not None:
            return
        with self._attempt():
            memory = room.bytes(tensor.nbytes)
            self._sent[tensor.name] = Sent(
                tensor.shape, tensor.dtype, digest(memory, self._algorithm)
            )
            self._session.filled(tensor, room)

    def finish(self, step: int) -> None:
        if self._session is not None and self.failure is None:
            with self._attempt():
                self._session.finish(self.manifest(step))

    def close(self) -> None:
        if self._session is not None:
            with self._attempt():
                self._session.close()

    def manifest(self, step: int) -> Manifest:
        return Manifest(step, self._algorithm, self._sent)

    def _attempt(self) -> _Attempt:
        return _Attempt(self)


class _Attempt:
    """Keeps the first exception of its body, instead of letting it end this rank's part."""

    def __init__(self, delivery: _Delivery) -> None:
        self._delivery = delivery

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        traceback.clear_frames(trace)  # they would hold on to the memory that is given back
        if self._delivery.failure is None:
            self._delivery.failure = error
        return True
