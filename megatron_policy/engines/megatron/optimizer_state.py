"""The optimizer's state on this rank as live tensors beside the model's parameters, and its count
of steps; knows no files, no names and no other rank's part.

Megatron-Core's own ways to save an optimizer are not used: with torch's Adam they fail on loading,
and they gather what is sharded.
"""

from __future__ import annotations

import torch

from megatron_policy.engines.megatron.optimizer import WrappedModel
from megatron_policy.engines.megatron.optimizer_shards import OptimizerShard, optimizer_shards
from megatron_policy.errors import CheckpointError
from megatron_policy.interfaces.engine import MAIN, StateTensor


class MegatronOptimizerState:
    """The optimizer's state of all parameters that this rank trains.

    Nothing is kept between calls but the optimizer. Its memory must be on the device, and
    parameters settled: a gather on its way would overwrite what is written here.
    """

    def __init__(self, model: WrappedModel) -> None:
        self._model = model

    @property
    def distributed(self) -> bool:
        """Whether the ranks that share a parameter's gradients hold different ranges of its state;
        the same on every rank. Those are the data-and-context-parallel ranks, and of an expert's
        parameters the ranks that have the same expert.
        """
        return bool(self._model.chunks[0].ddp_config.use_distributed_optimizer)

    @property
    def nbytes(self) -> int:
        """Of all that `tensors` returns once there is all of it."""
        return sum(
            (each.last - each.first) * torch.float32.itemsize * (each.separate + len(each.moments))
            for each in self._shards()
        )

    def tensors(self) -> list[StateTensor]:
        """What exists now: before the first step there are main parameters only, and none of those
        where the model's own are fp32. A parameter of which this rank has no range is left out.
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
        """Make what the first step would make, as it would: moments of zeros and counts of 0.

        What exists already stays as it is.
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
        """How often the optimizer has stepped by its own count, which corrects Adam's bias; None
        where it counts nothing: SGD, or a rank that trains nothing.

        CheckpointError if it is not the same for all parameters.
        """
        counts = {each.steps for each in self._shards()}
        if len(counts) > 1:
            raise CheckpointError(
                "the optimizer has not taken equally many steps for all parameters of this rank: "
                f"{', '.join(sorted(map(str, counts)))}. A checkpoint holds one number; let every "
                "step update all parameters"
            )
        return next(iter(counts), None)

    @torch.no_grad()
    def set_step(self, step: int) -> None:
        """Go on counting from here; after `materialize`. Nothing where nothing is counted."""
        for each in self._shards():
            if each.counts_alone:
                each.state["step"].fill_(step)
            elif each.counts_in_group:
                each.group["step"] = step

    @torch.no_grad()
    def restart(self) -> None:
        """Be as new over the model's parameters as they are now: main parameters taken from them,
        no moments, no steps.
        """
        for each in self._shards():
            each.inner.state.pop(each.main, None)
            if each.counts_in_group:
                each.group.pop("step", None)
            if each.separate:
                each.main.view(-1).copy_(each.own)

    def _shards(self) -> list[OptimizerShard]:
        return list(optimizer_shards(self._model.optimizer))
