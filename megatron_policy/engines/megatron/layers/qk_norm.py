"""QK norms whose weights differ between heads: each tensor-parallel rank has those of its own
heads.

Shapes: S positions, B batch, N heads of this rank, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_policy.engines.megatron.layers.norm import make_shard
from megatron_policy.parallel.groups import exchange, sum_all


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
