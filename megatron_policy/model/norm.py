"""RMS normalisation in plain torch for Megatron-Core's local layer spec; knows nothing of models.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.device import current_device


class RMSNorm(torch.nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, the mean taken in fp32.

    Works under sequence parallelism: each rank normalises its own positions, and the mark on the
    weight makes Megatron-Core add up the weight's gradient over the tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.empty(hidden_size, device=current_device(), dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x_fp32 * scale).to(x.dtype)
