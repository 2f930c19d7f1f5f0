"""An engine in another process: weights, a receiver, and what tests want to know of them."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor

from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.receive.receiver import Receiver
from tests.other_process import shared_memory_of

Bits = dict[str, tuple[tuple[int, ...], torch.dtype, bytes]]


def bits(weights: dict[str, Tensor]) -> Bits:
    """Shape, dtype and bytes of each tensor."""
    return {
        name: (tuple(t.shape), t.dtype, t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in weights.items()
    }


def zeros(forms: dict[str, Any]) -> dict[str, Tensor]:
    """A model that has learnt nothing."""
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in forms.items()}


class SmallEngine:
    """Holds the tensors of a model, and copies into them what it is given to load."""

    def __init__(self, weights: dict[str, Tensor], die_at_load: int = 0) -> None:
        self.weights = weights
        self.loads: list[list[str]] = []
        self._die_at = die_at_load

    def load(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Copy; KeyError or RuntimeError for tensors of another model."""
        self.loads.append([name for name, _ in tensors])
        if len(self.loads) == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)


_here: dict[str, Any] = {}  # this process's engine and receiver


def start(forms: dict[str, Any], die_at_load: int, options: dict[str, Any]) -> None:
    """Make this process an engine of zeros with these shapes; options are the receiver's."""
    _here["engine"] = SmallEngine(zeros(forms), die_at_load)
    _here["receiver"] = Receiver(_here["engine"].load, **{"expected": forms, **options})


def receive(address: str) -> int:
    """One refit over the stream; the step."""
    return _here["receiver"].receive_ipc_stream(address).step


def receive_handles(handles: Any) -> None:
    """Some weights of a refit by handles."""
    _here["receiver"].receive_ipc_handles(handles)


def finish(manifest: RefitManifest) -> int:
    """The end of a refit by handles; the step."""
    return _here["receiver"].finish_ipc(manifest).step


def state() -> tuple[Bits, int | None, bool, list[list[str]]]:
    """Weights, the step accepted last, whether they are mixed, and the names of each load."""
    engine, receiver = _here["engine"], _here["receiver"]
    return bits(engine.weights), receiver.step, receiver.mixed, engine.loads


def left() -> list[str]:
    """Shared memory that is still mapped or open here."""
    return shared_memory_of("self")


def imported() -> set[str]:
    """Top-level names of all modules."""
    return {name.partition(".")[0] for name in sys.modules}
