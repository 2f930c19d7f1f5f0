"""Optimizers and schedules of torch under FSDP2: what is refused, and state made early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.engines.hugging_face.optimizer import (
    FsdpOptimizerState,
    make_optimizer,
    make_schedule,
)
from megatron_policy.engines.hugging_face.table import Holding
from megatron_policy.errors import ConfigError
from tests.dist.cases import fsdp_config


def config_of(name: str, kwargs: dict[str, Any], **top: Any) -> PolicyConfig:
    asked = {"optimizer": {"name": f"torch.optim.{name}", "kwargs": {"lr": 0.01} | kwargs}}
    return PolicyConfig.parse(fsdp_config("model", {}, **asked, **top))


REFUSED = {
    "Adafactor": "keeps row_var, col_var for a parameter",
    "NAdam": "keeps mu_product for a parameter",
    "ASGD": "keeps eta, mu for a parameter",
    "Adagrad": "keeps state before its first step",
    "LBFGS": "cannot train: .*closure",
    "SparseAdam": "cannot train: .*dense gradients",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_whose_state_a_checkpoint_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"torch.optim.{name}' {REFUSED[name]}"):
        make_optimizer(config_of(name, {}), [])


def test_a_schedule_that_needs_a_metric_is_refused() -> None:
    asked = {"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}
    config = config_of("AdamW", {}, scheduler=asked)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau needs a metric at each step"):
        make_schedule(config, make_optimizer(config, []))


KEPT: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {},
    "RAdam": {"weight_decay": 0.1},
    "Adamax": {},
    "RMSprop": {"momentum": 0.5, "centered": True, "weight_decay": 0.1},
    "Rprop": {},
}


@pytest.mark.parametrize("name", KEPT)
def test_state_that_is_made_before_the_first_step_changes_no_step(name: str) -> None:
    ends = []
    for ahead in (False, True):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        row = SimpleNamespace(learnt=True, role=None)
        holding = Holding(parameter, (SimpleNamespace(row=row),), stacked=False)  # type: ignore[arg-type]
        optimizer = make_optimizer(config_of(name, KEPT[name]), [holding])
        state = FsdpOptimizerState(optimizer, [holding], [])
        before = parameter.detach().clone()
        if ahead:
            state.materialize()
            assert state.kinds and state.step == 0
        assert torch.equal(parameter, before)
        for number in range(3):
            parameter.grad = torch.linspace(number - 1, 2, 12).view(3, 4).cos()
            optimizer.step()
        ends.append(parameter.detach().clone())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], before)
