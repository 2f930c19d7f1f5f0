"""A trainer without a policy, that sends what it is given: for faults, and for what happens in an
engine meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.plan import RefitTensor
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests import oracle
from tests.exact import Exact
from tests.refit_trainer import StandIn

BUFFER = 32 * 1024
"""Less than a layer; much less than a model."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """What transports use of a plan."""

    tensors: tuple[RefitTensor, ...]
    bucket_bytes: int = BUFFER
    stages: tuple[int, ...] = (0,)

    def info(self) -> dict[str, Any]:
        """As for the real one."""
        return info_of({t.name: torch.empty(t.shape, dtype=t.dtype) for t in self.tensors})


class Trainer(StandIn):
    """One rank, which every transport takes for an exporter."""

    def plan(self, names: tuple[str, ...] | None = None, **options: Any) -> Plan:
        return Plan(super().plan(names).tensors)


def weights_of(path: Path) -> Weights:
    """The tensors of a checkpoint."""
    return load_file(path / "model.safetensors")


def info_of(weights: Weights) -> dict[str, Any]:
    """What an engine is told of them."""
    return {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}


def exact_of(path: Path, rows: list[list[int]]) -> Exact:
    """What transformers make of these rows: log-probabilities of all tokens but the first."""
    tokens = torch.tensor(rows)
    return Exact.of(path, lambda model: oracle.hf_logprobs(model, tokens))


class Damaging:
    """A transport, of which one tensor arrives with another bit."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def plan(self, exporter: Any) -> Any:
        return self._inner.plan(exporter)

    def open(self, exporter: Any, plan: Any) -> Any:
        session = self._inner.open(exporter, plan)
        filled = session.filled

        def damaged(tensor: Any, target: Any) -> None:
            if tensor.name == self._name:
                target.bytes(64)[5] ^= 1
            filled(tensor, target)

        session.filled = damaged
        return session


def send(
    weights: Weights,
    transport: Any,
    step: int,
    timeout_s: float = 60.0,
    during: Callable[[str], None] = lambda name: None,
) -> None:
    """One refit."""
    deliver(Trainer(weights, timeout_s, during), transport, step=step)


def die_at(name: str) -> Callable[[str], None]:
    """For `during`: this process is killed when that tensor has been handed to the transport."""

    def end(sent: str) -> None:
        if sent == name:
            os.kill(os.getpid(), signal.SIGKILL)

    return end


def stream_and_die(path: Path, address: str, name: str, timeout_s: float) -> None:
    """What a trainer's process is sent: a stream that ends with the process."""
    send(weights_of(path), IpcStream(address, BUFFER), 9, timeout_s, die_at(name))


def broadcast_and_die(path: Path, port: int, secret: str, name: str, timeout_s: float) -> None:
    """The same over a group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of a container need not resolve
    weights = weights_of(path)
    trainer = Trainer(weights, timeout_s)
    group = Collective.join(trainer, "127.0.0.1", port, 2, timeout_s=timeout_s, secret=secret)
    send(weights, group.transport(BUFFER), 9, timeout_s, die_at(name))
