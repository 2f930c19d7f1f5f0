"""Activation functions of MLPs; xIELU has constants that each layer learns.

Source of xIELU: Huang and Schlag 2024, "Deriving Activation Functions Using Integration".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import Activation
from megatron_policy.device import current_device


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x): the usual sigmoid approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _of_layer(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("`install_activations` gives every layer its own function")


FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
    Activation.CLAMPED_SWIGLU: _quick_gelu,
    Activation.SQUARED_RELU: _squared_relu,
    Activation.XIELU: _of_layer,
}
"""What Megatron-Core's config takes for each activation."""


def scale_input(
    function: Callable[[torch.Tensor], torch.Tensor], factor: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of its input times `factor`."""
    return function if factor == 1.0 else functools.partial(_of_scaled, function, factor)


def _of_scaled(
    function: Callable[[torch.Tensor], torch.Tensor], factor: float, x: torch.Tensor
) -> torch.Tensor:
    return function(factor * x)


class XIelu(MegatronModule):
    """`beta x + p x^2` where x is positive, and `beta x + n (exp(min(x, eps)) - 1 - x)` elsewhere,
    with `p = softplus(alpha_p)` and `n = beta + softplus(alpha_n)`.

    `alpha_p` and `alpha_n` are learnt, `beta` and `eps` are not; all have the shape `[1]`. The
    ranks of `group` hold the same constants and apply them to different channels, so the gradients
    are summed over them.
    """

    beta: torch.Tensor
    eps: torch.Tensor

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup) -> None:
        super().__init__(config)
        self.tp_group = group
        options: dict[str, Any] = {"device": current_device(), "dtype": config.params_dtype}
        self.alpha_p = torch.nn.Parameter(torch.empty(1, **options))
        self.alpha_n = torch.nn.Parameter(torch.empty(1, **options))
        self.register_buffer("beta", torch.empty(1, **options))
        self.register_buffer("eps", torch.empty(1, **options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape as `x`."""
        p, n = (
            F.softplus(copy_to_tensor_model_parallel_region(alpha, self.tp_group))
            for alpha in (self.alpha_p, self.alpha_n)
        )
        positive = p * x * x
        negative = (self.beta + n) * (torch.expm1(torch.minimum(x, self.eps)) - x)
        return torch.where(x > 0, positive, negative) + self.beta * x


def install_activations(
    model: GPTModel, architecture: Architecture, config: TransformerConfig
) -> None:
    """Give the MLPs of a chunk's layers their own activation functions, if these have constants."""
    if architecture.feed.activation is Activation.XIELU:
        for layer in model.decoder.layers:
            layer.mlp.activation_func = XIelu(config, layer.mlp.tp_group)
