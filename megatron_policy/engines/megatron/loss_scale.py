"""The factor on losses in float16, in which small gradients would be lost and large ones overflow.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)

from megatron_policy.config.megatron_sections import MegatronOptimizerConfig
from megatron_policy.engines.megatron.optimizer_shards import optimizer_shards
from megatron_policy.errors import CheckpointError

_GROWTH, _BACKOFF = 2.0, 0.5  # powers of two round nothing
SCALE = "loss_scale"
_GOOD_STEPS, _PATIENCE = "loss_scale_good_steps", "loss_scale_patience"


class LossScale:
    """One factor for all parameters of a model, the same on every rank.

    The scalers that Megatron-Core's optimizers make for themselves are not used: experts have an
    optimizer of their own, whose scale would part from that of all else.
    """

    def __init__(self, settings: MegatronOptimizerConfig) -> None:
        """Fixed if `loss_scale` is given; else it starts at `initial_loss_scale`."""
        self._settings = settings
        self._scaler: MegatronGradScaler = _dynamic(settings)
        if settings.loss_scale is not None:
            self._scaler = ConstantGradScaler(settings.loss_scale)

    @property
    def fixed(self) -> bool:
        """Whether it never changes."""
        return isinstance(self._scaler, ConstantGradScaler)

    @property
    def value(self) -> float:
        """The factor of the next step."""
        return float(self._scaler.scale)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the factor, without waiting for the device."""
        scaled: torch.Tensor = self._scaler.scale * loss
        return scaled

    @torch.no_grad()
    def unscale(self, optimizer: Any) -> None:
        """Divide the main parameters' gradients in `optimizer` by the factor."""
        gradients = [
            each.main.grad for each in optimizer_shards(optimizer) if each.main.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, self._scaler.inv_scale.squeeze())

    def count_step(self) -> None:
        """A step was taken. The factor doubles after `loss_scale_window` of them in a row."""
        self._scaler.update(False)

    def lower(self) -> bool:
        """Halve the factor for a gradient that was not finite, from the `hysteresis`-th on since it
        last grew. False if it is fixed or the least already: no smaller one would help.
        """
        if self.fixed or self.value <= self._settings.min_loss_scale:
            return False
        self._scaler.update(True)
        return True

    def state(self) -> dict[str, float | int]:
        """What `restore` continues from."""
        if self.fixed:
            return {SCALE: self.value}
        kept = self._scaler.state_dict()
        return {
            SCALE: self.value,
            _GOOD_STEPS: kept["growth_tracker"],
            _PATIENCE: kept["hysteresis_tracker"],
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Continue from what `state` has of a factor; begin anew if it has none, and return False.

        A fixed factor stays. CheckpointError for a state that is incomplete or not of numbers.
        """
        if self.fixed:
            return True
        if SCALE not in state:
            self._scaler = _dynamic(self._settings)
            return False
        scale, good, patience = (state.get(name) for name in (SCALE, _GOOD_STEPS, _PATIENCE))
        if good is None and patience is None:  # saved with a fixed factor
            good, patience = 0, self._settings.hysteresis
        counts = isinstance(good, int) and isinstance(patience, int)
        if not counts or not isinstance(scale, int | float) or not 0 < scale < float("inf"):
            raise CheckpointError(
                f"the checkpoint's loss scale cannot be used: {scale!r}, after {good!r} steps, "
                f"{patience!r} left. Load another checkpoint, or load this one with fresh_optimizer"
            )
        self._scaler.load_state_dict(
            {
                "scale": torch.tensor([float(scale)]),
                "growth_tracker": good,
                "hysteresis_tracker": patience,
            }
        )
        return True


def _dynamic(settings: MegatronOptimizerConfig) -> DynamicGradScaler:
    return DynamicGradScaler(
        initial_scale=settings.initial_loss_scale,
        min_scale=settings.min_loss_scale,
        growth_factor=_GROWTH,
        backoff_factor=_BACKOFF,
        growth_interval=settings.loss_scale_window,
        hysteresis=settings.hysteresis,
    )
