"""A stand-in for a policy's exporter: one rank, and tensors that are there as they are."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_policy.errors import RefitError
from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.buffers import BufferSlice
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.manifest import ServedModel
from megatron_policy.refit.plan import RefitTensor
from megatron_policy.refit.transports.ipc.transport import IpcStream

FORMS = {
    "embed": ((64, 24), torch.bfloat16),
    **{f"layers.{i}.weight": ((24, 32), torch.bfloat16) for i in range(6)},
    "router.bias": ((5,), torch.float32),
    "scale": ((), torch.float32),
    "norm": ((33,), torch.bfloat16),
}
"""A model of odd sizes: name -> (shape, dtype)."""

BUFFER = 2 * 2048  # bytes, of which the embedding needs 3072 and a layer 1536


def weights(seed: int, forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = FORMS) -> dict:
    """Random tensors, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in forms.items()
    }


@dataclass(frozen=True)
class Plan:
    """The part of a refit plan that sinks use."""

    tensors: tuple[RefitTensor, ...]

    def info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """As for the real one."""
        return {t.name: (t.shape, t.dtype) for t in self.tensors}


class StandIn:
    """One rank that holds everything; `during` is called with the name of each tensor it yields."""

    topology = Topology()
    coords = topology.coords(0)
    rank = 0

    def __init__(
        self,
        held: dict[str, Tensor],
        timeout_s: float = 4.0,
        during: Callable[[str], None] = lambda name: None,
        model: ServedModel | None = None,
    ) -> None:
        self.held, self.timeout_s, self._during = held, timeout_s, during
        self.served_model = model or ServedModel()
        self.ranks = self
        self.probe = next(iter(held.values()))
        self.device = self.probe.device

    def begin(self) -> None:
        """Alone, it meets nobody."""

    def alive(self) -> contextlib.AbstractContextManager[None]:
        """Nobody asks."""
        return contextlib.nullcontext()

    def select(self, *, adapters: bool) -> StandIn:
        """Itself: it has no adapters."""
        return self

    def plan(self, names: tuple[str, ...] | None = None) -> Plan:
        """Everything, or what is named."""
        if names is not None and (unknown := set(names) - self.held.keys()):
            raise RefitError(f"no tensor {unknown}")
        return Plan(
            tuple(
                RefitTensor(name, tuple(tensor.shape), tensor.dtype, 0)
                for name, tensor in self.held.items()
                if names is None or name in names
            )
        )

    def stream(
        self, plan: Plan, place: Callable[[RefitTensor], BufferSlice | None]
    ) -> Iterator[tuple[RefitTensor, BufferSlice | None]]:
        """As for the real one."""
        for tensor in plan.tensors:
            target = place(tensor)
            if target is not None:
                target.tensor(tensor.shape, tensor.dtype).copy_(self.held[tensor.name])
            yield tensor, target
            self._during(tensor.name)

    def agree(self, failure: Exception | None) -> None:
        """One rank agrees with itself."""
        if failure is not None:
            raise RefitError(str(failure)) from failure


def send_and_die(address: str, seed: int, die_after: str) -> None:
    """Stream weights, and be killed after one of them."""

    def die(name: str) -> None:
        if name == die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    sink = IpcStream(address, buffer_bytes=BUFFER)
    deliver(StandIn(weights(seed), timeout_s=20, during=die), sink, step=seed)
