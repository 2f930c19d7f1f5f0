"""A torch optimizer over sharded parameters, its schedule, and its state as ranges of tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.config import PolicyConfig
from megatron_policy.config.fsdp import PytorchOptimizerConfig
from megatron_policy.config.parallel_sizes import transformers_settings
from megatron_policy.config.trained import ParamGroupConfig
from megatron_policy.converters.rows import DECAYED
from megatron_policy.device import current_device, return_unused
from megatron_policy.device.timing import Stopwatch
from megatron_policy.engines.hugging_face.import_paths import (
    DEFAULT,
    make,
    make_schedule,
    put_back,
    refuse_schedule,
)
from megatron_policy.engines.hugging_face.process_groups import FsdpGroups
from megatron_policy.engines.hugging_face.sharding import Sharding
from megatron_policy.engines.hugging_face.table import Holding, local_part
from megatron_policy.engines.hugging_face.tensor_regions import sum_partial
from megatron_policy.engines.shared import read_samples
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.engine import NotFiniteError, StateTensor
from megatron_policy.weights.load import Held

_log = logging.getLogger(__name__)


GroupOf = Callable[[str], ParamGroupConfig | None]
"""From an HF tensor of a parameter to the group that the parameter is in."""


def make_optimizer(
    config: PolicyConfig, holdings: Sequence[Holding], group_of: GroupOf
) -> torch.optim.Optimizer:
    """The optimizer of `policy.optimizer` over all parameters that are not frozen, AdamW by
    default; `learning_rate` is used where its kwargs have no `lr`. ConfigError if it cannot be
    made.
    """
    asked = config.optimizer or PytorchOptimizerConfig(name=DEFAULT)
    kwargs = dict(asked.kwargs)
    if config.learning_rate is not None:
        kwargs.setdefault("lr", config.learning_rate)
    if isinstance(kwargs.get("betas"), list):
        kwargs["betas"] = tuple(kwargs["betas"])
    everywhere = transformers_settings(config).weight_decay_of == "all"
    groups: dict[tuple[tuple[str, float], ...], list[torch.Tensor]] = {(): []}
    for each in holdings:
        if each.is_trained:
            first = each.entries[0]
            decays = everywhere or first.row.role in DECAYED
            settings = {} if decays else {"weight_decay": 0.0}
            if (group := group_of(first.hf[0])) is not None:
                settings |= group.model_dump(include={"lr", "weight_decay"}, exclude_none=True)
            groups.setdefault(tuple(settings.items()), []).append(each.tensor)
    listed = [{"params": tensors, **dict(settings)} for settings, tensors in groups.items()]
    made: torch.optim.Optimizer = make(
        asked.name, torch.optim.Optimizer, "optimizer", listed, **kwargs
    )
    _refuse_unsaved(asked.name, kwargs)
    return made


def _refuse_unsaved(path: str, kwargs: Mapping[str, Any]) -> None:
    """ConfigError for an optimizer whose state checkpoints would not have, or that takes no step
    with gradients alone. What it keeps shows in a step of one small parameter.
    """
    parameter = torch.nn.Parameter(torch.ones(2, 3, device=current_device()))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make(path, torch.optim.Optimizer, "optimizer", [parameter], **kwargs)
    if optimizer.state:
        raise ConfigError(
            f"policy.optimizer.name={path!r} keeps state before its first step, which a policy "
            "cannot start anew. Use another optimizer, such as torch.optim.AdamW"
        )
    try:
        optimizer.step()
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"policy.optimizer.name={path!r} cannot train: {error}. Use an optimizer that steps "
            "with dense gradients alone, such as torch.optim.AdamW"
        ) from error
    kept = optimizer.state[parameter]
    lost = [
        kind
        for kind, value in kept.items()
        if kind != "step" and value is not None and getattr(value, "shape", ()) != parameter.shape
    ]
    if lost:
        raise ConfigError(
            f"policy.optimizer.name={path!r} keeps {', '.join(lost)} for a parameter, which "
            "checkpoints cannot have: they have the count of steps and what has the parameter's "
            "shape. Use another optimizer, such as torch.optim.AdamW"
        )


@dataclass(frozen=True)
class FsdpOptimizerState:
    """See `interfaces.engine.OptimizerState`. What torch keeps for a parameter in its shape is
    state of its elements; the count of steps is the optimizer's.
    """

    optimizer: torch.optim.Optimizer
    holdings: Sequence[Holding]
    held: Held
    distributed: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state that it keeps for each parameter."""
        self.materialize()
        return tuple(
            dict.fromkeys(kind for each in self._trained() for kind in self._states(each.tensor))
        )

    @property
    def nbytes(self) -> int:
        kinds = len(self.kinds)
        return sum(kinds * local_part(each.tensor).nbytes for each in self._trained())

    def tensors(self) -> list[StateTensor]:
        views = iter(self.held)
        found = []
        for each in self.holdings:
            own = [next(views)[1] for _ in each.entries]
            for kind, state in self._states(each.tensor).items():
                found += [
                    StateTensor(view, kind, part.view(-1), 0, part.numel())
                    for view, part in zip(own, each.views(state), strict=True)
                ]
        return found

    def materialize(self) -> None:
        """Take a step without gradients and weight decay, undo what it does to weights, and keep
        the state that it makes for parameters that have none.
        """
        missing = [each.tensor for each in self._trained() if not self._states(each.tensor)]
        if not missing:
            return
        kept = [(p, p.grad, local_part(p).clone()) for p in missing]
        decays = [group.get("weight_decay") for group in self.optimizer.param_groups]
        others = [
            (p, p.grad)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if not any(p is each for each in missing)
        ]
        try:
            for group in self.optimizer.param_groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            for parameter, _ in others:
                parameter.grad = None
            for parameter in missing:
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
        finally:
            for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
            for parameter, gradient in others:
                parameter.grad = gradient
            for parameter, gradient, value in kept:
                local_part(parameter).copy_(value)
                parameter.grad = gradient
        self._set_counts(missing, 0)

    @property
    def step(self) -> int | None:
        counts = {int(state["step"]) for state in self.optimizer.state.values() if "step" in state}
        return max(counts, default=0)

    def set_step(self, step: int) -> None:
        self._set_counts([each.tensor for each in self._trained()], step)

    def restart(self) -> None:
        self.optimizer.state.clear()

    def _set_counts(self, parameters: Sequence[torch.Tensor], step: int) -> None:
        for parameter in parameters:
            state = self.optimizer.state[parameter]
            if isinstance(count := state.get("step"), torch.Tensor):
                count.fill_(step)
            elif count is not None:
                state["step"] = step

    def _trained(self) -> list[Holding]:
        """What this rank trains: FSDP1 gives it nothing of some parameters, and no gradients."""
        return [each for each in self.holdings if each.is_trained and each.tensor.numel()]

    def _states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the optimizer keeps in the shape of the parameter."""
        return {
            kind: value
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim()
        }


class FsdpTrainable:
    """See `interfaces.engine.Trainable`. FSDP reduces gradients within the backward pass of each
    microbatch; they are sums over ranks.
    """

    loss_scale: None = None

    def __init__(
        self,
        config: PolicyConfig,
        group_of: GroupOf,
        holdings: Sequence[Holding],
        held: Held,
        groups: FsdpGroups,
        sharding: Sharding,
    ) -> None:
        self._holdings, self._held, self._groups = holdings, held, groups
        self._sharding = sharding
        self._trained = [each for each in holdings if each.is_trained]
        self._parameters = [each.tensor for each in self._trained]
        self._config, self._samples, self._steps = config, 0, 0
        self._ended = False
        self.stopwatch = Stopwatch()
        self.optimizer = make_optimizer(config, holdings, group_of)
        self._start = [dict(group) for group in self.optimizer.param_groups]
        refuse_schedule(config, self.optimizer)
        self._schedule = make_schedule(config, self.optimizer)

    @property
    def state(self) -> FsdpOptimizerState:
        return FsdpOptimizerState(self.optimizer, self._holdings, self._held)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def weight_decay(self) -> float:
        return float(self.optimizer.param_groups[0].get("weight_decay", 0.0))

    def zero_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._sharding.forget_gradients()

    def accumulating(self) -> AbstractContextManager[None]:
        """Nothing: what FSDP adds up of each microbatch is reduced already, and sums of sums are
        the same.
        """
        return nullcontext()

    def reduce_gradients(self, factor: float) -> None:
        """See `Trainable`; only the factor is left to apply."""
        for gradient in self._gradients():
            gradient.mul_(factor)

    def step(self) -> float:
        tp = self._groups.batch.tp
        if tp.size() > 1:
            sum_partial(self._trained, tp)
        # Ranks hold disjoint parts of the gradient, but for copies that tensor-parallel ranks have,
        # of which the first counts.
        total = torch.zeros((), dtype=torch.float64, device=self._held[0][1].device)
        counted = [each.tensor for each in self._trained if each.cut.is_first(tp.rank())]
        if gradients := [local_part(p.grad) for p in counted if p.grad is not None]:
            norms = torch._foreach_norm(gradients)
            total = torch.stack([norm.double() for norm in norms]).square().sum()
        dist.all_reduce(total, group=self._groups.shards)
        norm = math.sqrt(float(total))
        if not math.isfinite(norm):
            raise NotFiniteError(norm)
        if (most := self._config.max_grad_norm) and norm > most:
            torch._foreach_mul_(self._gradients(), most / (norm + 1e-6))
        self.optimizer.step()
        self._steps += 1
        every = transformers_settings(self._config).clear_cache_every_n_steps
        if every and self._steps % every == 0:
            return_unused()
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        return [local_part(p.grad) for p in self._parameters if p.grad is not None]

    def skip_step(self) -> bool:
        """See `Trainable`: no factor is used."""
        return False

    def routing_metrics(self) -> dict[str, float]:
        """See `Trainable`: transformers' routers are not watched."""
        return {}

    def advance_schedule(self, samples: int) -> None:
        """See `Trainable`; torch's schedules count calls."""
        self._samples += samples
        self._next_rates()

    def _next_rates(self) -> None:
        """Rates for the next call. A schedule that ends, as OneCycleLR does, leaves its last ones:
        weights have moved, so nothing is to be refused any more.
        """
        try:
            self._schedule.step()
        except ValueError as error:
            if not self._ended:
                _log.warning(
                    "policy.scheduler has ended, its last learning rate stays: %s. Give it as many "
                    "steps as there are calls of train",
                    error,
                )
            self._ended = True

    def settle(self) -> None:
        """See `Trainable`: nothing is under way after a step."""

    def schedule_state(self) -> dict[str, Any]:
        """The samples and the calls that the schedule has counted."""
        return {"num_steps": self._samples, "scheduler_steps": self._schedule.last_epoch}

    def restore_schedule(self, state: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
        """See `Trainable`. Another engine's schedule counts samples alone: a global batch is then
        a call.
        """
        samples = read_samples(state)
        calls = state.get("scheduler_steps", samples // self._config.train_global_batch_size)
        put_back(self.optimizer, self._start)
        self._schedule = make_schedule(self._config, self.optimizer)
        self._ended = False
        for _ in range(calls):
            self._next_rates()
        self._samples = samples
        return {}
