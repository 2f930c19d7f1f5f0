"""A linear layer that tensor-parallel ranks do not share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.engines.megatron.layers.norm import replicated


class WholeLinear(torch.nn.Module):
    """Every tensor-parallel rank holds the whole weight `[outputs, inputs]` and applies it to its
    own positions. Like Megatron-Core's layers it returns a bias besides, here None.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = replicated(config, outputs, inputs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None
