"""What a step does with the routers of this rank's layers: correction biases and metrics.

Shapes: E experts, L layers of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_policy.config import MegatronConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.device import current_device
from megatron_policy.engines.megatron.layers.balancing import (
    BY_GLOBAL_BATCH,
    BY_MICROBATCH,
    BY_SEQUENCE,
)
from megatron_policy.engines.megatron.layers.experts import ExpertLayer, balancing_coefficient
from megatron_policy.engines.megatron.layers.router import Router

BALANCE = {
    BY_MICROBATCH: "load_balancing_loss",
    BY_SEQUENCE: "seq_load_balancing_loss",
    BY_GLOBAL_BATCH: "global_load_balancing_loss",
}
"""Names of the metric of each kind of load balancing loss, as Megatron-Core has them."""
Z_LOSS, MOST, IDLE, BIAS = "z_loss", "max_over_mean_tokens", "idle_experts", "expert_bias_norm"


@dataclass(frozen=True)
class Routers:
    """The routers of this rank by their layer's number in the model; none in a dense model, and
    on a stage without experts.
    """

    by_layer: tuple[tuple[int, Router], ...]
    layers: int
    """L, or 0 for a dense model."""
    bias_update_rate: float
    per_layer: bool
    reported: tuple[str, ...]
    pp: dist.ProcessGroup

    @classmethod
    def of(
        cls,
        layers: Iterable[tuple[int, torch.nn.Module]],
        architecture: Architecture,
        settings: MegatronConfig,
        pp: dist.ProcessGroup,
    ) -> Routers:
        """Of this rank's `layers` of the model."""
        routers = []
        for number, layer in layers:
            if isinstance(layer.mlp, ExpertLayer):
                routers.append((number, layer.mlp.router))
        moe, reported = architecture.moe, [MOST, IDLE]
        if moe is not None and balancing_coefficient(settings, moe):
            reported.append(BALANCE[settings.moe_router_load_balancing_type or ""])
        if settings.moe_z_loss_coeff:
            reported.append(Z_LOSS)
        if moe is not None and moe.correction_bias:
            reported.append(BIAS)
        return cls(
            by_layer=tuple(routers),
            layers=0 if moe is None else architecture.num_layers,
            # The biases are of the base, which adapters leave as it is.
            bias_update_rate=0.0
            if settings.peft.enabled
            else settings.moe_router_bias_update_rate or 0.0,
            per_layer=settings.moe_per_layer_logging,
            reported=tuple(reported),
            pp=pp,
        )

    def restart(self) -> None:
        """Begin a step: nothing has been counted."""
        for _, router in self.by_layer:
            router.balancing.restart()

    def scale_losses(self, factor: float) -> None:
        """Multiply the sums of the auxiliary losses, whose gradients have been multiplied too."""
        for _, router in self.by_layer:
            router.balancing.step_sums[-2:] *= factor

    @torch.no_grad()
    def finish_step(self) -> None:
        """Add up what all ranks of the stage have counted, and update the correction biases.
        Collective.

        A bias grows by the rate where its expert had fewer tokens than the mean, and falls by it
        where it had more. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2.
        """
        if not self.by_layer:
            return
        observed = [router.balancing for _, router in self.by_layer]
        total = torch.stack([each.step_sums for each in observed])
        dist.all_reduce(total, group=observed[0].all_replicas)
        for (_, router), sums in zip(self.by_layer, total, strict=True):
            router.balancing.step_sums.copy_(sums)
            if router.expert_bias is None or not self.bias_update_rate:
                continue
            tokens_E = sums[:-2]
            # Whole numbers, so that an expert with exactly the mean stays as it is.
            direction_E = (tokens_E.sum() - tokens_E * tokens_E.numel()).sign()
            router.expert_bias += self.bias_update_rate * direction_E.to(router.expert_bias)

    def metrics(self) -> dict[str, float]:
        """Of the step that `finish_step` ended, the same on every rank; collective. Empty for a
        dense model.

        Means over the layers with experts; `expert_bias_norm` is the norm of all layers' biases.
        With `per_layer` also of each layer, as `moe/NAME_layer_NUMBER`.
        """
        if not self.layers:
            return {}
        # A column of ones for layers with experts, then one for each of these.
        names = (BALANCE[BY_MICROBATCH], Z_LOSS, MOST, IDLE, BIAS)
        table = torch.zeros(
            self.layers, 1 + len(names), dtype=torch.float64, device=current_device()
        )
        for number, router in self.by_layer:
            sums, bias_E = router.balancing.step_sums, router.expert_bias
            tokens_E, losses_2 = sums[:-2], sums[-2:]
            most = tokens_E.max() * tokens_E.numel() / tokens_E.sum().clamp(min=1)
            idle = (tokens_E == 0).double().mean()
            norm = torch.zeros_like(most) if bias_E is None else bias_E.double().norm()
            table[number] = torch.stack([torch.ones_like(most), *losses_2, most, idle, norm])
        if self.pp.size() > 1:
            dist.all_reduce(table, group=self.pp)
        rows = {number: row for number, row in enumerate(table.tolist()) if row[0]}
        found: dict[str, float] = {}
        for name in self.reported:
            column = 1 + names.index(name if name in names else names[0])
            values = {number: row[column] for number, row in rows.items()}
            if name == BIAS:
                found[name] = math.sqrt(sum(value * value for value in values.values()))
            else:
                found[name] = sum(values.values()) / len(values)
            if self.per_layer:
                each = {f"moe/{name}_layer_{number}": value for number, value in values.items()}
                found |= each
        return found
