"""Movers by name: trainers choose one, and engines make the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple

from torch import Tensor

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.transports.ipc.shared_memory import Handle, attach, create
from megatron_policy.refit.transports.movers.mover import Mover
from megatron_policy.refit.transports.movers.nixl import NixlMover, check_bounds

Open = Callable[[int, float, Callable[[], object]], Mover]
"""Makes a mover: how many bytes it has, its longest wait, and what is called during that."""


class SharedMemoryMover:
    """Moves bytes between processes of one user on one machine, through unnamed files that both
    have mapped. A write is over when it returns.
    """

    def __init__(self, nbytes: int, timeout_s: float, watch: Callable[[], object]) -> None:
        """RefitError if there is not so much shared memory. Nothing is waited for."""
        self._own = create(nbytes, who="this process")
        self.memory = self._own.tensor()
        self.description = json.dumps(astuple(self._own.handle())).encode()
        self._others: dict[bytes, Tensor] = {}

    def write(self, to: bytes, chunk: Tensor, at: int) -> SharedMemoryMover:
        if to not in self._others:
            try:
                handle = Handle(*map(int, json.loads(to)))
            except (ValueError, TypeError, RecursionError) as error:
                raise RefitError(f"this describes no shared memory: {to[:80]!a}") from error
            self._others[to] = attach(handle, who="the trainer", writable=True).tensor()
        target = self._others[to]
        check_bounds(at, chunk.numel(), target.numel())
        target[at : at + chunk.numel()].copy_(chunk)
        return self

    def wait(self) -> None:
        """Do nothing: it is there."""

    def close(self) -> None:
        self._others.clear()
        self.memory = self.memory.new_empty(0)
        self._own.close()


MOVERS: dict[str, Open] = {"shared_memory": SharedMemoryMover, "nixl": NixlMover}
"""By the names that `Collective.shards` and offers have for them."""


def find_mover(name: str) -> Open:
    """What makes movers of that name; ConfigError for a name that none has."""
    if name not in MOVERS:
        raise ConfigError(f"mover={name!r} is none of {', '.join(MOVERS)}: give one of these")
    return MOVERS[name]
