"""Takes back what a step changes before it is known whether it can be taken; knows neither batches
nor losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_policy.model.random_state import kept


@dataclass(frozen=True)
class Undo:
    """Random numbers, and the buffers that routers change while gradients are reduced, as they were
    when this was made.

    Dropout and losses draw random numbers, on some ranks perhaps more than on others. Megatron-Core
    moves each router's bias at the end of the schedule, before the gradient's norm is known, and
    counts tokens for it in every forward pass.
    """

    draw_again: Callable[[], None]
    buffers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def here(cls, models: Sequence[torch.nn.Module]) -> Undo:
        """As they are now; routers of `models`."""
        return cls(kept(), tuple((live, live.clone()) for live in _routers_buffers(models)))

    def __call__(self) -> None:
        """Make it so again."""
        self.draw_again()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Those of routers only: random numbers that were drawn stay drawn."""
        for live, before in self.buffers:
            live.copy_(before)


def _routers_buffers(models: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for model in models:
        if not model.config.moe_router_enable_expert_bias:
            continue
        for module in model.modules():
            if getattr(module, "expert_bias", None) is not None:
                yield module.expert_bias
                yield module.local_tokens_per_expert
