"""One rank of the trainer: trains, hands the weights to the engine, compares, and trains on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_policy import MegatronPolicy
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.transport import IpcStream

from .remote import RemoteEngine
from .task import PROMPT, VOCAB, NextNumberLoss, counting

TRANSPORTS = ("ipc stream", "ipc handles", "collective", "directory")
CONTINUATION = 10

TOLERANCE = 1e-4
"""For a log-probability, in fp32. The weights are equal bit for bit, as the manifest's digests
show. Megatron-Core and transformers use different kernels and summation orders, and so do
tensor-parallel ranks, which causes about 1e-6 here. A wrong weight causes more than 1e-2.
"""


@dataclass(frozen=True)
class Report:
    """One refit, as seen by training rank 0 and its engine."""

    step: int
    transport: str
    loss: float
    seconds: float
    difference: float
    """The largest difference between the engine's log-probabilities and the trainer's."""
    continuation: list[int]

    @property
    def right(self) -> int:
        """How many tokens continue the count of the prompt."""
        expected = [(PROMPT[-1] + n) % VOCAB for n in range(1, len(self.continuation) + 1)]
        return sum(a == b for a, b in zip(self.continuation, expected, strict=True))


class Refits:
    """All transports from a policy to its engine. Every rank has one; the engine belongs
    to rank 0.
    """

    def __init__(self, policy: MegatronPolicy, engine: RemoteEngine | None, folder: Path) -> None:
        self._policy, self._engine, self._folder = policy, engine, folder
        self._handles = IpcHandles(policy.exporter)
        self._group: Collective | None = None
        info = policy.exporter.plan().info()
        if engine is not None:
            engine.call("expect", info)

    def by(self, transport: str) -> None:
        """Run one refit; collective. RefitError on every rank if the engine refuses."""
        {
            "ipc stream": self._by_stream,
            "ipc handles": self._by_handles,
            "collective": self._by_collective,
            "directory": self._by_directory,
        }[transport]()

    def close(self) -> None:
        """Release what is kept between refits."""
        self._handles.release()
        if self._group is not None:
            self._group.close()

    def _by_stream(self) -> None:
        address = f"ipc://{self._folder}/refit.sock"
        self._while_it("stream", address, lambda: self._policy.refit(IpcStream(address)))

    def _by_handles(self) -> None:
        self._policy.memory.ready("a refit by handles")
        names = [tensor.name for tensor in self._policy.exporter.plan().tensors]
        for first in range(0, len(names), 20):
            handles = self._handles.weights(names[first : first + 20])
            if self._engine is not None:
                self._engine.call("handles", handles)
        manifest = self._handles.manifest(self._policy.steps)
        if self._engine is not None:
            self._engine.call("finish", manifest)

    def _by_collective(self) -> None:
        if self._group is None:
            self._join()
        assert self._group is not None
        transport = self._group.transport()
        self._while_it("collective", None, lambda: self._policy.refit(transport))

    def _by_directory(self) -> None:
        path = self._folder / "weights"
        self._policy.refit(HfDirectory(path, overwrite=True))
        if self._engine is not None:
            self._engine.call("directory", str(path))

    def _join(self) -> None:
        """Create a group of rank 0 and the engine; the other ranks are not part of it."""
        world_size = 2
        with reserved_port() as port:  # only used by rank 0
            self._group = Collective.join(self._policy.exporter, "127.0.0.1", port, world_size)
        if self._engine is not None:
            self._engine.call("join", port, 1, world_size, self._group.secret)

    def _while_it(self, method: str, argument: str | None, send: Callable[[], object]) -> None:
        """Send while the engine receives; if both fail, the sender's error contains the
        engine's.
        """
        if self._engine is not None:
            self._engine.begin(method, *([] if argument is None else [argument]))
        try:
            send()
        finally:
            if self._engine is not None:
                self._engine.result()


def session(
    policy: MegatronPolicy, engine: RemoteEngine | None, folder: Path, steps: int, rounds: int
) -> Iterator[Report]:
    """`steps` optimizer steps and a refit, over every transport in turn, `rounds` times.

    Collective: every rank must iterate to the end. The engine and the reports belong to rank 0;
    `folder` is the same for all.
    """
    report: Report | None = None
    refits = Refits(policy, engine, folder)
    try:
        for transport in TRANSPORTS * rounds:
            losses = [train_step(policy) for _ in range(steps)]  # while the engine generates
            if engine is not None and report is not None:
                yield replace(report, continuation=engine.result())
            started = time.monotonic()
            refits.by(transport)
            seconds = time.monotonic() - started
            difference = compare(policy, engine)
            report = Report(policy.steps, transport, losses[-1], seconds, difference, [])
            if engine is not None:
                engine.begin("generate", PROMPT, CONTINUATION)
        if engine is not None and report is not None:
            yield replace(report, continuation=engine.result())
    finally:
        refits.close()


def train_step(policy: MegatronPolicy) -> float:
    """Run one optimizer step and return its loss."""
    result = policy.train(counting(policy.steps), NextNumberLoss())
    return float(result["loss"].item())


def compare(policy: MegatronPolicy, engine: RemoteEngine | None) -> float:
    """The largest difference of a log-probability between trainer and engine; 0 without an
    engine.
    """
    batch = counting(seed=-1)
    own_BS = policy.logprobs(batch)[:, 1:]
    if engine is None:
        return 0.0
    found_BS = torch.tensor(engine.call("logprobs", batch["input_ids"].tolist()))
    return (found_BS - own_BS.cpu()).abs().max().item()
