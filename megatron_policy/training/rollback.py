"""Undoes what a step changes before it is known whether the step can be taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_policy.device.random_states import remember
from megatron_policy.interfaces.engine import TrainingEngine


@dataclass(frozen=True)
class Rollback:
    """Random numbers and the engine's volatile buffers as they were when this was made.

    Dropout and losses draw random numbers, possibly more on some ranks than on others. Routers
    count in every forward pass, before the gradient norm is known.
    """

    draw_again: Callable[[], None]
    buffers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def here(cls, engine: TrainingEngine) -> Rollback:
        """Record the current state."""
        buffers = tuple((live, live.clone()) for live in engine.volatile_buffers())
        return cls(remember(engine), buffers)

    def __call__(self) -> None:
        """Restore random numbers and buffers."""
        self.draw_again()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore the volatile buffers only, not the random numbers."""
        for live, before in self.buffers:
            live.copy_(before)
