"""Many refits back to back: `python -m tests.soak.refits 2000` counts those that fail.

    stream       our receiver, at a socket of its own for each refit
    host         an engine that speaks the host's protocol, with a new ZeroMQ socket for each refit
    host, kept   the same with one socket for all refits, as the host's own engines have it
    handles      the host's older protocol, which has no socket

With a pause, every second engine waits between its last acknowledgement and the end of its socket.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from torch import Tensor

from megatron_policy.errors import RefitError
from megatron_policy.refit.buffers import align
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.receive import ipc as ipc_receiving
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.protocol import Dialect
from megatron_policy.refit.transports.ipc.shared_memory import Handle, open_exported
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.other_process import OtherProcess
from tests.refit_trainer import FORMS, StandIn

PROTOCOLS = ("stream", "host", "host, kept", "handles")
TIMEOUT_S = 60.0  # of one refit: none may come near it
LIMIT_S = 3600.0  # for all of them
BUFFER = 2**16
END = "all sent"


@dataclass(frozen=True)
class Outcome:
    """How many refits of one protocol failed, and with what words."""

    protocol: str
    pause_s: float
    count: int
    failures: list[str] = field(default_factory=list)

    def line(self) -> str:
        pause = f"{self.pause_s * 1000:g} ms at every second end" if self.pause_s else "no pause"
        kinds = {words: self.failures.count(words) for words in self.failures}
        said = "".join(f"\n  {times} x {words}" for words, times in kinds.items())
        return f"{self.protocol}, {pause}: {len(self.failures)} of {self.count} failed{said}"


def soak(protocol: str, count: int, pause_s: float = 0.0) -> Outcome:
    """`count` refits with values 1, 2, .., each to be what the engine holds afterwards."""
    outcome = Outcome(protocol, pause_s, count)
    engine = OtherProcess()
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            if protocol == "handles":
                _by_handles(engine, outcome)
            else:
                _by_stream(engine, f"ipc://{folder}/s", outcome)
    finally:
        engine.kill()
    return outcome


def _by_stream(engine: OtherProcess, address: str, outcome: Outcome) -> None:
    own = outcome.protocol == "stream"
    if own:
        engine.begin(receive, address, outcome.count, outcome.pause_s)
    else:
        kept = outcome.protocol == "host, kept"
        engine.begin(answer, address, outcome.count, outcome.pause_s, kept)
    transport = IpcStream(address, BUFFER, dialect=Dialect(None if own else END))

    def refit(value: int) -> None:
        deliver(StandIn(_weights(value), TIMEOUT_S), transport, step=value)

    _each(outcome, refit)
    outcome.failures.extend(engine.result(LIMIT_S))


def _by_handles(engine: OtherProcess, outcome: Outcome) -> None:
    engine.call(begin_handles)

    def refit(value: int) -> None:
        handles = IpcHandles(StandIn(_weights(value), TIMEOUT_S))
        try:
            engine.call(take_handles, handles.weights(tuple(FORMS), value))
            engine.call(finish_handles, handles.manifest(value), value)
        finally:
            handles.release()

    _each(outcome, refit)


def _each(outcome: Outcome, refit: Callable[[int], None]) -> None:
    """All of them; the last again until it succeeds, as the engine waits for it."""
    for value in range(1, outcome.count + 1):
        for _ in range(20 if value == outcome.count else 1):
            try:
                refit(value)
                break
            except RefitError as error:
                outcome.failures.append(str(error))


def _weights(value: int) -> dict[str, Tensor]:
    """A model of that value; `scale` has it exactly."""
    small = value % 251
    held = {name: torch.full(shape, small, dtype=dtype) for name, (shape, dtype) in FORMS.items()}
    return {**held, "scale": torch.tensor(float(value))}


def _value_of(weights: dict[str, Tensor]) -> int:
    """Which model it is; RuntimeError for a mixture."""
    value = int(weights["scale"])
    expected = _weights(value)
    if unequal := [name for name in FORMS if not torch.equal(weights[name], expected[name])]:
        raise RuntimeError(f"{unequal} are not of refit {value}")
    return value


# What the engine's process is sent.


def receive(address: str, last: int, pause_s: float) -> list[str]:
    """Our receiver, until it has the last refit; what it heard of those that failed, unless the
    trainer heard it as well.
    """
    held: dict[str, Tensor] = {}
    ends = 0

    def load(tensors: list[tuple[str, Tensor]]) -> None:
        held.update({name: tensor.clone() for name, tensor in tensors})

    def paused(*args: Any) -> Any:
        nonlocal ends
        line, ends = answering(*args), ends + 1
        return _Paused(line, pause_s if ends % 2 else 0.0)

    receiver = Receiver(load, expected=FORMS, timeout_s=TIMEOUT_S)
    answering, ipc_receiving.ReplySocket = ipc_receiving.ReplySocket, paused
    try:
        while receiver.step != last:
            with contextlib.suppress(RefitError):
                step = receiver.receive_ipc_stream(address).step
                assert step == _value_of(held)
        return []
    finally:
        ipc_receiving.ReplySocket = answering


class _Paused:
    """A line whose end waits."""

    def __init__(self, line: Any, pause_s: float) -> None:
        self._line, self._pause_s = line, pause_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    def close(self, linger_s: float = 0.0) -> None:
        time.sleep(self._pause_s)
        self._line.close(linger_s)


def answer(address: str, last: int, pause_s: float, kept: bool) -> list[str]:
    """An engine of the host's: takes packs and the end, and knows nothing else."""
    value, ends, deadline = 0, 0, time.monotonic() + LIMIT_S
    context = zmq.Context()
    with contextlib.ExitStack() as all_refits:
        socket = all_refits.enter_context(_replying(context, address)) if kept else None
        while value != last:
            with contextlib.ExitStack() as one_refit:
                line = socket or one_refit.enter_context(_replying(context, address))
                value, ends = _answered(line, deadline), ends + 1
                time.sleep(pause_s if ends % 2 else 0.0)
    context.term()
    return []


@contextlib.contextmanager
def _replying(context: zmq.Context[Any], address: str) -> Iterator[zmq.Socket[Any]]:
    with context.socket(zmq.REP) as socket:
        socket.linger = 2000
        socket.reconnect_ivl = 20  # within the pause
        socket.connect(address)
        yield socket


def _answered(socket: zmq.Socket[Any], deadline: float) -> int:
    """One refit; which it was."""
    held: dict[str, Tensor] = {}
    while True:
        assert socket.poll(max(0.0, deadline - time.monotonic()) * 1000), "the trainer is silent"
        said = pickle.loads(socket.recv())
        if said != END:
            open_exported(
                Handle(*said[0][1:]), lambda memory, said=said: _unpack(held, said, memory)
            )
        else:
            value = _value_of(held)
        socket.send(b"ack")
        if said == END:
            return value


def _unpack(held: dict[str, Tensor], said: tuple[Any, list[str], int], memory: Tensor) -> None:
    offset = 0
    for name in said[1]:
        shape, dtype = FORMS[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        held[name] = memory[offset : offset + size].view(dtype).view(shape).clone()
        offset += align(size)


_here: dict[str, Any] = {}


def begin_handles() -> None:
    """Be an engine that is called with handles."""
    _here["held"] = held = {}
    _here["receiver"] = Receiver(
        lambda tensors: held.update({name: tensor.clone() for name, tensor in tensors}),
        expected=FORMS,
    )


def take_handles(handles: Any) -> None:
    _here["receiver"].receive_ipc_handles(handles)


def finish_handles(manifest: Any, value: int) -> None:
    _here["receiver"].finish_ipc(manifest)
    assert _value_of(_here["held"]) == value


def main() -> None:
    """Every protocol that is asked for, with and without the pause."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("count", type=int, help="refits of each protocol")
    options.add_argument("--protocol", choices=PROTOCOLS, action="append", help="default: all")
    options.add_argument("--pause-ms", type=float, default=60.0)
    chosen = options.parse_args()
    failed = 0
    for protocol in chosen.protocol or PROTOCOLS:
        for pause_s in (0.0, chosen.pause_ms / 1000):
            outcome = soak(protocol, chosen.count, pause_s)
            print(outcome.line(), flush=True)
            failed += len(outcome.failures)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
