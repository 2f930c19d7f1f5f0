"""The norm of the whole model's gradient, with every element counted once.

Megatron-Core's own norm goes by marks on parameters. Releases before 0.19 lose elements of experts
where expert and tensor parallelism meet, and Transformer Engine marks some replicated weights as
split. Here rows and layout decide what is counted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows.blocks import of_expert
from megatron_policy.converters.rows.shards import is_split
from megatron_policy.device import current_device
from megatron_policy.engines.megatron.optimizer_shards import optimizer_shards
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import Held

_CLIP_EPSILON = 1e-6
"""What Megatron-Core adds to a norm before it divides by it."""


@dataclass(frozen=True)
class GradientNorm:
    """Which of its parameters' gradients this rank counts, by `id`: those that data-parallel ranks
    hold in ranges, and those that they hold whole.
    """

    in_ranges: frozenset[int]
    whole: frozenset[int]

    @classmethod
    def of(cls, held: Held, architecture: Architecture, place: Placement) -> GradientNorm:
        """Of tensor-parallel copies the first one counts, and of a tied embedding the original."""
        counted = []
        for entry, parameter in held:
            shard = place.shard_of(entry.row)
            first = shard.rank == 0 or is_split(entry.row, architecture, shard.size)
            if first and entry.row.owns:
                counted.append((id(parameter), place.copy_of(entry.row).number == 0))
        return cls(
            frozenset(key for key, _ in counted),
            frozenset(key for key, first in counted if first),
        )

    @torch.no_grad()
    def __call__(self, optimizer: Any, *, distributed: bool) -> float:
        """The L2 norm of the reduced gradients in `optimizer`; the same on every rank. Collective.

        With `distributed` each rank's optimizer has other ranges of the gradients than the ranks
        that share its parameters. Sums of squares are fp64, of norms per parameter in fp32.
        """
        counted: Collection[int] = self.in_ranges if distributed else self.whole
        gradients = [
            each.main.grad
            for each in optimizer_shards(optimizer)
            if id(each.parameter) in counted and each.main.grad is not None
        ]
        total = torch.zeros((), dtype=torch.float64, device=current_device())
        if gradients:
            norms = torch._foreach_norm([gradient.float() for gradient in gradients])
            total += torch.stack(norms).double().square().sum()
        dist.all_reduce(total)
        return float(total.sqrt())


@dataclass(frozen=True)
class ClippedApart:
    """Parameters, by `id`, whose gradient is clipped by a norm of its own to the L2 norm `clip`:
    what they learn cannot slow down the rest of the model.
    """

    norm: GradientNorm
    parameters: frozenset[int]
    clip: float

    @classmethod
    def of(
        cls, held: Held, architecture: Architecture, place: Placement, clip: float
    ) -> ClippedApart:
        """`held` are these parameters on this rank, possibly none."""
        ids = frozenset(id(parameter) for _, parameter in held)
        return cls(GradientNorm.of(held, architecture, place), ids, clip)

    @torch.no_grad()
    def rescale(self, optimizer: Any, own: float, other: float) -> None:
        """Multiply these gradients, whose norm is `own`, such that they are clipped correctly once
        all gradients are clipped as the `other` norm, that of the rest, demands.
        """
        factor = self._coefficient(own) / self._coefficient(other)
        gradients = [
            each.main.grad
            for each in optimizer_shards(optimizer)
            if id(each.parameter) in self.parameters and each.main.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _coefficient(self, norm: float) -> float:
        """What Megatron-Core multiplies gradients of that norm by; 1 without clipping."""
        return min(1.0, self.clip / (norm + _CLIP_EPSILON)) if self.clip else 1.0


def separate_experts(held: Held, place: Placement) -> None:
    """Let Megatron-Core reduce experts' gradients over the ranks that hold the same experts, where
    these are others than those that hold the same of all else; to be called before gradient
    buffers are made.

    It does so by itself only if expert parallelism has more than one rank; releases before 0.19
    forget experts that are split over fewer ranks than all else. It also adds the gradients of
    their biases over tensor-parallel ranks, as of biases whose input is split along the sequence.
    """
    for entry, parameter in held:
        if of_expert(entry.row.megatron):
            parameter.allreduce = not place.topology.experts_apart  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
