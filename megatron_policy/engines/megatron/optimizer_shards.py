"""Finds the range of each parameter that a Megatron-Core optimizer trains on this rank, and the
tensor that represents it in the inner torch optimizer; the tensors of all that takes memory; and
its state as live tensors with the model's parameters, with its step count.

Megatron-Core's own ways to save an optimizer are not used: with torch's Adam they fail on loading,
and they gather what is sharded.

Optimizers are distinguished by their attributes, not their class names: those of Transformer Engine
and Apex replace torch's where they are installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron_policy.errors import CheckpointError
from megatron_policy.interfaces.engine import MAIN, StateTensor
from megatron_policy.memory.states import Kind


@dataclass(frozen=True)
class OptimizerShard:
    """Elements `first` to `last` of a flattened parameter, and what `inner` holds for them."""

    parameter: torch.Tensor
    main: torch.Tensor
    """The tensor `inner` updates: the parameter, a view of it, or a wider copy."""
    first: int
    last: int
    inner: torch.optim.Optimizer
    group: dict[str, Any]
    """The parameter group of `inner` that contains `main`."""

    @property
    def separate(self) -> bool:
        """Whether `main` is a copy in its own memory."""
        return self.main.dtype != self.parameter.dtype

    @property
    def own(self) -> torch.Tensor:
        """These elements in the model's parameter."""
        return self.parameter.data.view(-1)[self.first : self.last]

    @property
    def state(self) -> dict[str, Any]:
        """The state of `inner` for them; changing the returned dict need not change `inner`."""
        kept: dict[str, Any] = self.inner.state.get(self.main) or {}
        return kept

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of the tensors that `inner` keeps besides `main` once it has stepped."""
        if self._is_adam and not self.group.get("amsgrad"):
            return ("exp_avg", "exp_avg_sq")
        if "momentum" in self.group:
            return ("momentum_buffer",) if self.group["momentum"] else ()
        raise CheckpointError(
            "the state of this optimizer cannot be saved: by its settings, "
            f"{', '.join(sorted(map(str, self.group)))}, it is neither Adam nor SGD. Set "
            "megatron_cfg.optimizer.optimizer to adam or sgd"
        )

    @property
    def counts_alone(self) -> bool:
        """Whether steps are counted in a tensor of its state, as in torch's Adam."""
        return self._is_adam and "bias_correction" not in self.group

    @property
    def counts_in_group(self) -> bool:
        """Whether steps are counted in the group, as in fused Adam, the only one with this key."""
        return self._is_adam and "bias_correction" in self.group

    @property
    def steps(self) -> int | None:
        """The number of counted steps; None if steps are not counted."""
        if self.counts_alone:
            return int(self.state["step"]) if "step" in self.state else 0
        if self.counts_in_group:
            return int(self.group["step"]) if "step" in self.group else 0
        return None

    @property
    def _is_adam(self) -> bool:
        return "betas" in self.group


def optimizer_shards(optimizer: Any) -> Iterator[OptimizerShard]:
    """All that `optimizer`, from Megatron-Core's `get_megatron_optimizer`, trains here."""
    for leaf in _find_leaves(optimizer):
        inner = leaf.optimizer
        groups = {id(main): group for group in inner.param_groups for main in group["params"]}
        for parameter, main, first, last in _find_ranges(leaf):
            yield OptimizerShard(parameter, main, first, last, inner, groups.pop(id(main)))
        assert not groups, "the optimizer trains what belongs to no parameter of the model"


def resident_tensors(
    models: Sequence[torch.nn.Module], trainable: Any
) -> Iterator[tuple[Kind, torch.Tensor]]:
    """Parameters, gradients and optimizer state, which can share storages: main parameters can be
    views of the parameters, and those of the buffer of their chunk. State that a step has added
    since the last call is included. `trainable` is a `MegatronTrainable`, or None.
    """
    parameters = [parameter for model in models for parameter in model.parameters()]
    for tensor in [*parameters, *(buffer for model in models for buffer in model.buffers())]:
        yield Kind.PARAMETERS, tensor
    if trainable is None:
        return
    buffers = [each for c in trainable.chunks for each in (*c.buffers, *c.expert_parallel_buffers)]
    inner = [leaf.optimizer for leaf in _find_leaves(trainable.optimizer)]
    mains = [main for each in inner for group in each.param_groups for main in group["params"]]
    for buffer in buffers:
        yield Kind.GRADIENTS, buffer.grad_data
    for tensor in (*parameters, *mains):
        for name in ("grad", "main_grad", "decoupled_grad"):
            gradient = getattr(tensor, name, None)
            if gradient is not None:
                yield Kind.GRADIENTS, gradient
    for main in mains:
        yield Kind.OPTIMIZER, main
    for state in (state for each in inner for state in each.state.values()):
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield Kind.OPTIMIZER, value


def _find_leaves(optimizer: Any) -> Iterator[Any]:
    """The optimizers in a chain; those that train nothing on this rank are skipped."""
    if hasattr(optimizer, "chained_optimizers"):
        for chained in optimizer.chained_optimizers:
            yield from _find_leaves(chained)
    elif optimizer.optimizer is not None:
        yield optimizer


def _find_ranges(leaf: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Each parameter that `leaf` trains, the tensor that represents it inside, and its range."""
    if hasattr(leaf, "shard_fp32_from_float16_groups"):  # distributed over data-parallel ranks
        # The optimizer's own index is not used: it is wrong in groups of two dtypes.
        models = chain(*leaf.model_fp32_groups, *leaf.model_float16_groups)
        mains = chain(*leaf.shard_fp32_groups, *leaf.shard_fp32_from_float16_groups)
        for parameter, main in zip(models, mains, strict=True):
            own = leaf._get_model_param_range_map(parameter)["param"]
            yield parameter, main, own.start, own.end
        return
    if hasattr(leaf, "fp32_from_float16_groups"):  # whole, wider copies
        pairs = [
            *zip(chain(*leaf.float16_groups), chain(*leaf.fp32_from_float16_groups), strict=True),
            *((same, same) for same in chain(*leaf.fp32_from_fp32_groups)),
        ]
    else:
        pairs = [(same, same) for group in leaf.optimizer.param_groups for same in group["params"]]
    for parameter, main in pairs:
        yield parameter, main, 0, parameter.numel()


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
