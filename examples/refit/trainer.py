"""One rank of the trainer: trains, hands the weights to the engine, compares, and trains on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_policy import MegatronPolicy
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.shards import place_on_grid
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.delta_stream import DeltaShards, DeltaStream
from megatron_policy.refit.transports.deltas import DeltaDirectory
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.transport import IpcStream

from .remote import RemoteEngine
from .task import PROMPT, VOCAB, NextNumberLoss, counting

WHOLE = ("ipc stream", "ipc handles", "collective", "directory")
DELTAS = ("directory of deltas", "stream of deltas", "deltas to shards")
TRANSPORTS = (*WHOLE, *DELTAS)
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
    sent: RefitManifest
    """What rank 0 has sent: all weights, or what has changed since the refit before."""
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
        self._groups: dict[str, Collective] = {}
        self._shards: DeltaShards | None = None
        info = policy.exporter.plan().info()
        if engine is not None:
            engine.call("expect", info)

    def by(self, transport: str) -> RefitManifest:
        """Run one refit; collective. RefitError on every rank if the engine refuses."""
        return {
            "ipc stream": lambda: self._by_stream(IpcStream),
            "ipc handles": self._by_handles,
            "collective": self._by_collective,
            "directory": self._by_directory,
            "directory of deltas": self._by_deltas,
            "stream of deltas": lambda: self._by_stream(lambda at: DeltaStream(IpcStream(at))),
            "deltas to shards": self._by_shards,
        }[transport]()

    def close(self) -> None:
        """Release what is kept between refits."""
        self._handles.release()
        for group in self._groups.values():
            group.close()

    def _by_stream(self, transport_at: Callable[[str], IpcStream | DeltaStream]) -> RefitManifest:
        address = f"ipc://{self._folder}/refit.sock"
        transport = transport_at(address)
        return self._while_it("stream", address, lambda: self._policy.refit(transport))

    def _by_handles(self) -> RefitManifest:
        self._policy.memory.ready("a refit by handles")
        names = [tensor.name for tensor in self._policy.exporter.plan().tensors]
        for first in range(0, len(names), 20):
            handles = self._handles.weights(names[first : first + 20])
            if self._engine is not None:
                self._engine.call("handles", handles)
        manifest = self._handles.manifest(self._policy.steps)
        if self._engine is not None:
            self._engine.call("finish", manifest)
        return manifest

    def _by_collective(self) -> RefitManifest:
        if "collective" not in self._groups:
            self._join("collective", None)
        transport = self._groups["collective"].transport()
        return self._while_it("collective", "collective", lambda: self._policy.refit(transport))

    def _by_directory(self) -> RefitManifest:
        path = self._folder / "weights"
        sent = self._policy.refit(HfDirectory(path, overwrite=True))
        if self._engine is not None:
            self._engine.call("directory", str(path))
        return sent

    def _by_deltas(self) -> RefitManifest:
        path = self._folder / "deltas"
        sent = self._policy.refit(DeltaDirectory(path))
        if self._engine is not None:
            self._engine.call("follow", str(path))
        return sent

    def _by_shards(self) -> RefitManifest:
        """Every rank sends its own shards of what has changed, and nothing is gathered. This engine
        has one rank, which holds all of them.
        """
        if self._shards is None:
            exporter = self._policy.exporter
            self._join("shards", exporter.topology.world_size)
            held = place_on_grid(exporter.plan(), exporter.table.architecture, Topology())
            self._shards = DeltaShards(self._groups["shards"].shards(held))
        refits = self._shards
        return self._while_it("collective", "shards", lambda: self._policy.refit(refits))

    def _join(self, name: str, trainers: int | None) -> None:
        """Create a group of all `trainers` and the engine; None: of rank 0 and the engine."""
        first, exporter = trainers or 1, self._policy.exporter
        with reserved_port() as port:
            told = [port]
            dist.broadcast_object_list(told)  # all meet at that of rank 0
            sizes = {"world_size": first + 1, "train_world_size": trainers}
            where = {"ip": "127.0.0.1", "port": told[0]}
            group = Collective.join(exporter, **where, **sizes, of_shards=trainers is not None)
        self._groups[name] = group
        if self._engine is not None:
            self._engine.call("join", name, port, group.secret, first, first + 1, trainers)

    def _while_it(
        self, method: str, argument: str, send: Callable[[], RefitManifest]
    ) -> RefitManifest:
        """Send while the engine receives; if both fail, the sender's error contains the
        engine's.
        """
        if self._engine is not None:
            self._engine.begin(method, argument)
        try:
            return send()
        finally:
            if self._engine is not None:
                self._engine.result()


def session(
    policy: MegatronPolicy, engine: RemoteEngine | None, folder: Path, steps: int, rounds: int
) -> Iterator[Report]:
    """`steps` optimizer steps and a refit, `rounds` times over each transport.

    Collective: every rank must iterate to the end. The engine and the reports belong to rank 0;
    `folder` is the same for all.
    """
    report: Report | None = None
    refits = Refits(policy, engine, folder)
    try:
        for transport in (each for each in TRANSPORTS for _ in range(rounds)):
            losses = [train_step(policy) for _ in range(steps)]  # while the engine generates
            if engine is not None and report is not None:
                yield replace(report, continuation=engine.result())
            started = time.monotonic()
            sent = refits.by(transport)
            seconds = time.monotonic() - started
            difference = compare(policy, engine)
            report = Report(policy.steps, transport, losses[-1], seconds, sent, difference, [])
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
