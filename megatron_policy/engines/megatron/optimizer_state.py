"""The optimizer's state on this rank as live tensors with the model's parameters, and its step
count.

Megatron-Core's own ways to save an optimizer are not used: with torch's Adam they fail on loading,
and they gather what is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron_policy.engines.megatron.optimizer_shards import OptimizerShard, optimizer_shards
from megatron_policy.errors import CheckpointError
from megatron_policy.interfaces.engine import MAIN, StateTensor


@dataclass(frozen=True)
class MegatronOptimizerState:
    """The optimizer's state of all parameters that this rank trains.

    Keeps nothing between calls but the optimizer. Its memory must be on the device and parameters
    settled: a pending gather would overwrite what is written here.
    """

    optimizer: MegatronOptimizer
    distributed: bool
    """Whether the ranks that share a parameter's gradients hold different ranges of its state; the
    same on every rank. Those are the data-and-context-parallel ranks, and for an expert's
    parameters the ranks that hold the same expert.
    """

    @property
    def kinds(self) -> tuple[str, ...]:
        settings = self.optimizer.config
        if settings.optimizer == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if settings.sgd_momentum else ()

    @property
    def nbytes(self) -> int:
        """The bytes of all that `tensors` returns once all state exists."""
        return sum(
            (each.last - each.first) * torch.float32.itemsize * (each.separate + len(each.moments))
            for each in self._shards()
        )

    def tensors(self) -> list[StateTensor]:
        """The state that exists now. Before the first step there are only main parameters, and none
        if the model's own are fp32. Parameters of which this rank has no range are left out.
        """
        found = []
        for each in self._shards():
            parts = {MAIN: each.main} if each.separate else {}
            parts |= {kind: each.state[kind] for kind in each.moments if kind in each.state}
            for kind, tensor in parts.items():
                flat = tensor.detach().view(-1)
                assert len(flat) == each.last - each.first, (kind, tensor.shape, each.first)
                found.append(StateTensor(each.parameter, kind, flat, each.first, each.last))
        return found

    @torch.no_grad()
    def materialize(self) -> None:
        """Make the state that the first step would make: moments of zeros and counts of 0.

        Existing state is unchanged.
        """
        for each in self._shards():
            state = each.inner.state[each.main]
            if each.counts_alone and "step" not in state:
                on_device = each.group["capturable"] or each.group["fused"]
                device = each.main.device if on_device else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            elif each.counts_in_group and "step" not in each.group:
                each.group["step"] = 0
            for kind in each.moments:
                if kind not in state:
                    state[kind] = torch.zeros_like(each.main)

    @property
    def step(self) -> int | None:
        """The optimizer's own step count, which corrects Adam's bias; None if there is none: SGD,
        or a rank that trains nothing.

        CheckpointError if it differs between parameters.
        """
        counts = {each.steps for each in self._shards()}
        if len(counts) > 1:
            raise CheckpointError(
                "parameters of this rank have different step counts "
                f"({', '.join(sorted(map(str, counts)))}); a checkpoint stores one, so every step "
                "must update all parameters"
            )
        return next(iter(counts), None)

    @torch.no_grad()
    def set_step(self, step: int) -> None:
        """Continue counting from here; call after `materialize`. No effect without a count."""
        for each in self._shards():
            if each.counts_alone:
                each.state["step"].fill_(step)
            elif each.counts_in_group:
                each.group["step"] = step

    @torch.no_grad()
    def restart(self) -> None:
        """Reset to a new optimizer over the model's current parameters: main parameters copied from
        them, no moments, no steps.
        """
        for each in self._shards():
            each.inner.state.pop(each.main, None)
            if each.counts_in_group:
                each.group.pop("step", None)
            if each.separate:
                each.main.view(-1).copy_(each.own)

    def _shards(self) -> list[OptimizerShard]:
        return list(optimizer_shards(self.optimizer))
