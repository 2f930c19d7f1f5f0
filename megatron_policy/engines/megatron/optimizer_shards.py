"""Finds the range of each parameter that a Megatron-Core optimizer trains on this rank, and the
tensor that represents it in the inner torch optimizer; and the tensors of all that takes memory.

Optimizers are distinguished by their attributes, not their class names: those of Transformer Engine
and Apex replace torch's where they are installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from megatron_policy.errors import CheckpointError
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
