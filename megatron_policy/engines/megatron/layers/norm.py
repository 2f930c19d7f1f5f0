"""Normalization layers in plain torch for Megatron-Core's local layer spec; QK norms whose weights
differ between heads, of which each tensor-parallel rank has those of its own; and a linear layer
that every rank holds whole.

Sources: Ba et al. 2016, "Layer Normalization"; Zhang and Sennrich 2019, "Root Mean Square Layer
Normalization".

Shapes: S positions, B batch, N heads of this rank, H head dim.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import Norm
from megatron_policy.device import current_device
from megatron_policy.parallel.groups import exchange, sum_all


def norm_of(architecture: Architecture) -> ModuleSpec:
    """The architecture's norm, to be built from `config`, `hidden_size` and `eps`."""
    if architecture.norm is Norm.LAYER:
        return ModuleSpec(module=LayerNorm, params={"with_bias": architecture.norm_bias})
    plus_one = architecture.norm is Norm.RMS_PLUS_ONE
    return ModuleSpec(module=RMSNorm, params={"plus_one": plus_one})


def replicated(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """A parameter of which every tensor-parallel rank holds a full copy.

    Works under sequence parallelism: each rank applies it to its own positions, and the attribute
    makes Megatron-Core sum the gradient over the tensor-parallel ranks.
    """
    parameter = torch.nn.Parameter(
        torch.empty(*shape, device=current_device(), dtype=config.params_dtype)
    )
    cast(Any, parameter).sequence_parallel = config.sequence_parallel
    return parameter


def make_replica(config: TransformerConfig, shape: tuple[int, ...]) -> torch.nn.Parameter:
    """As `replicated`, of a module that all ranks call with the same values. Where its gradient is
    whole on each, it is averaged: kernels need not compute it alike on all of them.
    """
    parameter = replicated(config, *shape)
    mark_replica(config, parameter)
    return parameter


def mark_replica(config: TransformerConfig, parameter: torch.nn.Parameter) -> None:
    """Have the gradient of such a parameter averaged where it is whole on each rank."""
    cast(Any, parameter).average_gradients_across_tp_domain = not config.sequence_parallel


def make_shard(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """A parameter that is this tensor-parallel rank's part of one, cut along its first dimension:
    its gradient is complete and counts in the gradient norm.
    """
    parameter = torch.nn.Parameter(
        torch.empty(*shape, device=current_device(), dtype=config.params_dtype)
    )
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


class RMSNorm(torch.nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, the mean taken in fp32.

    With `plus_one` the weight is stored minus 1, and applied in fp32.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        plus_one: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.plus_one = plus_one
        self.weight = replicated(config, hidden_size)
        if config.perform_initialization:
            torch.nn.init.constant_(self.weight, 0.0 if plus_one else 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The weight is not given to torch: on GPUs it would multiply before rounding.
        shape = self.weight.shape
        if self.plus_one:
            normed = F.rms_norm(x.float(), shape, None, self.eps)
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * F.rms_norm(x, shape, None, self.eps)


class LayerNorm(torch.nn.Module):
    """`weight * (x - mean) / sqrt(variance + eps)` over the last dimension, in fp32, with or
    without a bias.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        with_bias: bool = True,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = replicated(config, hidden_size)
        self.bias = replicated(config, hidden_size) if with_bias else None
        if config.perform_initialization:
            torch.nn.init.ones_(self.weight)
            if self.bias is not None:
                torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class WholeLinear(torch.nn.Module):
    """Every tensor-parallel rank holds the whole weight `[outputs, inputs]` and applies it to its
    own positions. Like Megatron-Core's layers it returns a bias besides, here None.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = replicated(config, outputs, inputs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


class _OwnHeads(torch.nn.Module):
    """A norm whose weight is a part of one that ranks share."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For Megatron-Core's checkpoints."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )
        return sharded


class AllHeadsRMSNorm(_OwnHeads):
    """RMS normalization over all heads of a token together, including those of other ranks (OLMo 2,
    2024): `[S, B, N, H]` to the same.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"]).tp
        self.width = heads * hidden_size
        self.weight = _of_own_heads(config, self.width // self.group.size())

    def forward(self, x_SBNH: torch.Tensor) -> torch.Tensor:
        x_SBD = x_SBNH.float().flatten(2)
        square = sum_over_ranks(x_SBD.pow(2).sum(-1, keepdim=True), self.group)
        scale = torch.rsqrt(square / self.width + self.eps)
        return (self.weight * x_SBD.mul(scale)).to(x_SBNH.dtype).view_as(x_SBNH)


class EachHeadLayerNorm(_OwnHeads):
    """Layer normalization of each head, with its own weights and no bias (Cohere's Command R+):
    `[S, B, N, H]` to the same.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        parts = config.tensor_model_parallel_size
        self.weight = _of_own_heads(config, heads // parts, hidden_size)

    def forward(self, x_SBNH: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.layer_norm(x_SBNH.float(), x_SBNH.shape[-1:], eps=self.eps)
        return (self.weight.float() * normed).to(x_SBNH.dtype)


def _of_own_heads(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    parameter = make_shard(config, *shape)
    if config.perform_initialization:
        torch.nn.init.ones_(parameter)
    return parameter


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the ranks' `x`, on which all that each of them has depends: its gradient is a sum
    over ranks as well.
    """
    if group.size() == 1:
        return x
    return exchange(x, lambda own: sum_all(own, group), lambda grad: sum_all(grad, group))
