"""Optimizers and schedules of torch under FSDP2: what is refused, and state made early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.engines.hugging_face.import_paths import make_schedule, refuse_schedule
from megatron_policy.engines.hugging_face.optimizer import (
    FsdpOptimizerState,
    FsdpTrainable,
    make_optimizer,
)
from megatron_policy.engines.hugging_face.table import Holding
from megatron_policy.errors import ConfigError
from tests.dist.cases import fsdp_config


def config_of(name: str, kwargs: dict[str, Any], **top: Any) -> PolicyConfig:
    asked = {"optimizer": {"name": f"torch.optim.{name}", "kwargs": {"lr": 0.01} | kwargs}}
    return PolicyConfig.parse(fsdp_config("model", {}, **asked, **top))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        # State that a checkpoint cannot have.
        ("Adafactor", {}, "torch.optim.Adafactor' keeps row_var, col_var for a parameter"),
        ("NAdam", {}, "torch.optim.NAdam' keeps mu_product for a parameter"),
        ("ASGD", {}, "torch.optim.ASGD' keeps eta, mu for a parameter"),
        ("Adagrad", {}, "torch.optim.Adagrad' keeps state before its first step"),
        ("LBFGS", {}, "torch.optim.LBFGS' cannot train: .*closure"),
        ("SparseAdam", {}, "torch.optim.SparseAdam' cannot train: .*dense gradients"),
        # Arguments that it does not take.
        ("AdamW", {"betas": 3}, r"optimizer.kwargs: torch.optim.AdamW does not take"),
        ("AdamW", {"lr": "1e-3"}, r"lr is text: write 0.001 \(YAML wants 1.0e-3, not 1e-3\)"),
        ("Optimizer", {}, r"optimizer.kwargs: torch.optim.Optimizer does not take"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(name: str, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(config_of(name, kwargs), [], {}.get)


def test_a_schedule_that_needs_a_metric_is_refused() -> None:
    asked = {"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}
    config = config_of("AdamW", {}, scheduler=asked)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau needs a metric at each step"):
        make_schedule(config, make_optimizer(config, [], {}.get))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            [{"name": "StepLR", "kwargs": {"step_size": 0}}],
            r"cannot take a step: .*zero\. Look at the kwargs",
        ),
        ([{"name": "LRScheduler"}], r"LRScheduler does not take \{\}: it is abstract"),
        ([{"name": "Linear"}], "give a path such as torch.optim.lr_scheduler.LinearLR"),
        (
            [*[{"name": "ConstantLR"}] * 3, {"milestones": [4, 2]}],
            r"milestones \[4, 2\]: give each a later step",
        ),
    ],
    ids=["no steps", "abstract", "unknown", "order"],
)
def test_schedules_that_cannot_be_are_refused(listed: list[dict[str, Any]], message: str) -> None:
    path = "torch.optim.lr_scheduler."
    asked = [each | {"name": path + each["name"]} if "name" in each else each for each in listed]
    config = config_of("AdamW", {}, scheduler=asked)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ConfigError, match=message):
        refuse_schedule(config, optimizer)
    assert {name: optimizer.param_groups[0][name] for name in before} == before


@pytest.mark.parametrize("milestones", [[-2], "2", [True], 3])
def test_milestones_that_are_not_steps_are_refused(milestones: Any) -> None:
    with pytest.raises(ConfigError, match=r"scheduler: .*milestones are a list of whole numbers"):
        config_of("AdamW", {}, scheduler=[{"milestones": milestones}])


def test_a_schedule_that_ends_leaves_its_last_rates(caplog) -> None:
    trainable = FsdpTrainable.__new__(FsdpTrainable)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    trainable.optimizer, trainable._samples, trainable._ended = optimizer, 0, False
    trainable._schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
    for _ in range(3):
        optimizer.step()
        trainable.advance_schedule(8)
    last = trainable.lr
    for _ in range(3):
        trainable.advance_schedule(8)
    assert trainable.lr == last and trainable.schedule_state()["num_steps"] == 48
    (warned,) = [record.message for record in caplog.records if "has ended" in record.message]
    assert "Give it as many steps as there are calls of train" in warned


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
        row = SimpleNamespace(role=None)
        holding = Holding(parameter, (SimpleNamespace(row=row, hf=("w",)),), stacked=False)  # type: ignore[arg-type]
        optimizer = make_optimizer(config_of(name, KEPT[name]), [holding], {}.get)
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
