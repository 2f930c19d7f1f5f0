"""Takes back what a step changes before it is known whether it can be taken; knows neither batches
nor losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_policy.device.random_states import kept
from megatron_policy.interfaces.engine import TrainingEngine


@dataclass(frozen=True)
class Rollback:
    """Random numbers and the engine's volatile buffers as they were when this was made.

    Dropout and losses draw random numbers, on some ranks perhaps more than on others. Routers
    change their buffers in every forward pass and reduction, before the gradient's norm is known.
    """

    draw_again: Callable[[], None]
    buffers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def here(cls, engine: TrainingEngine) -> Rollback:
        """As they are now."""
        buffers = tuple((live, live.clone()) for live in engine.volatile_buffers())
        return cls(kept(engine), buffers)

    def __call__(self) -> None:
        """Make it so again."""
        self.draw_again()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Those of routers only: random numbers that were drawn stay drawn."""
        for live, before in self.buffers:
            live.copy_(before)
