"""Factors on embeddings, as a hook on Megatron-Core's module, and softcaps.

Source of softcaps: "Gemma 2: Improving Open Language Models at a Practical Size" (2024).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_policy.converters.architecture import Architecture


def install_scales(model: GPTModel, architecture: Architecture) -> None:
    """Make a chunk that holds the embeddings scale them as the architecture says."""
    if model.pre_process:
        model.embedding.embedding_dropout.p = architecture.embedding_dropout
        if architecture.embedding_scale != 1.0:
            model.embedding.register_forward_hook(_Scaled(architecture.embedding_scale))


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(x / cap)`: close to `x` where it is small, never beyond the cap."""
    return torch.tanh(x / cap) * cap


class _Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        # In the activations' precision, to which transformers also rounds the factor.
        return output * output.new_full((), self.scale)
