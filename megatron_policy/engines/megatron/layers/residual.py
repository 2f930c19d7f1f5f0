"""How the output of attention or an MLP is added to the residual stream.

Source of norms after attention and MLP: Liu et al. 2022, "Swin Transformer V2"; of the factor: Yang
et al. 2022, "Tensor Programs V".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.converters.architecture import Architecture, Norms
from megatron_policy.engines.megatron.layers.norm import norm_of


class ResidualSum(torch.nn.Module):
    """`residual + dropout(scale * norm(x + bias))`, for Megatron-Core's bias-dropout-add."""

    def __init__(self, config: TransformerConfig, norm: ModuleSpec | None, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.norm = norm and norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """The function that a Megatron-Core layer calls next; there is no fused kernel for it."""

        def add(
            x_with_bias: tuple[torch.Tensor, torch.Tensor | None],
            residual: torch.Tensor,
            dropout: float,
        ) -> torch.Tensor:
            x, bias = x_with_bias
            if bias is not None:
                x = x + bias
            if self.norm is not None:
                x = self.norm(x)
            if self.scale != 1.0:
                x = x * self.scale
            return residual + torch.nn.functional.dropout(x, dropout, training)

        return add


def residual_sum(
    architecture: Architecture, norms: Norms, config: TransformerConfig, factor: float = 1.0
) -> ModuleSpec | None:
    """A layer's own residual sum, with a `factor` on what is added; None for Megatron-Core's plain
    sum.
    """
    scale = architecture.residual_scale * factor
    if not norms.after and scale == 1.0:
        return None
    params: dict[str, Any] = {
        "config": config,
        "norm": norm_of(architecture) if norms.after else None,
        "scale": scale,
    }
    return ModuleSpec(module=ResidualSum, params=params)
