"""Learning rate and weight decay over calls of `train`, the other optimizer, and keys around a step
that change how it is done and not what comes of it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_policy.engines.megatron import trainable
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, LENGTH, OVERLAPPED, VOCAB
from tests.dist.resuming import merged, replaced

DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
LR, MIN_LR, WARMUP, DECAY = 1e-3, 1e-4, 3, 7


def rates(config: dict[str, Any], calls: int, evaluate_between: bool) -> list[tuple[float, float]]:
    """(learning rate, weight decay) that each call of `train` reports having used."""
    with open_policy(config, init_reference_model=False) as policy:
        used = []
        for _ in range(calls):
            if evaluate_between:
                policy.train(own_share(policy, DATA), LOSSES["token"](), eval_mode=True, mbs=1)
            result = policy.train(own_share(policy, DATA), LOSSES["token"](), mbs=1)
            metrics = result["microbatch_metrics"]
            assert len({*metrics["lr"]}) == len({*metrics["wd"]}) == 1
            used.append((metrics["lr"][0], metrics["wd"][0]))
        return used


def scheduled(**schedule: Any) -> dict[str, Any]:
    return {
        "optimizer": {"lr": LR, "min_lr": MIN_LR, "weight_decay": 0.1},
        "scheduler": {
            "lr_decay_style": "cosine",
            "lr_warmup_iters": WARMUP,
            "lr_decay_iters": DECAY,
            "lr_warmup_init": 0.0,
        }
        | schedule,
    }


@pytest.mark.parametrize("evaluate_between", [False, True])
@pytest.mark.parametrize("name", ["one process", "DP2"])
def test_one_call_is_one_iteration_of_warmup_and_decay(
    ranks, checkpoints, name: str, evaluate_between: bool
) -> None:
    config = policy_config(checkpoints[True], LAYOUTS[name].megatron | scheduled())
    expected = [LR * call / WARMUP for call in range(WARMUP)]
    for call in range(WARMUP, DECAY + 1):
        done = (call - WARMUP) / (DECAY - WARMUP)
        expected.append(MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * done)) / 2)
    calls = DECAY + 3
    expected += [MIN_LR] * (calls - len(expected))
    for used in ranks.run(LAYOUTS[name].world, rates, config, calls, evaluate_between):
        assert [lr for lr, _ in used] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_schedules_of_torch_follow_one_another_at_milestones(ranks, checkpoints) -> None:
    schedules = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 2}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 0.5}},
        {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.1}},
        {"milestones": [2, 3]},
    ]
    place = FSDP2_LAYOUTS["FSDP2 x 2"]
    config = policy_config(checkpoints[True], place.megatron, LR, scheduler=schedules)
    third = 1 / 3  # where torch's LinearLR starts
    expected = [third, (1 + third) / 2, 0.5, 1, 0.1, 0.01]
    for used in ranks.run(place.world, rates, config, len(expected), True):
        assert [lr / LR for lr, _ in used] == pytest.approx(expected, rel=1e-6)
        assert {wd for _, wd in used} == {oracle.WEIGHT_DECAY}


def test_weight_decay_grows_from_start_to_end(ranks, checkpoints) -> None:
    growing = scheduled(
        start_weight_decay=0.0, end_weight_decay=0.7, weight_decay_incr_style="linear"
    )
    (used,) = ranks.run(1, rates, policy_config(checkpoints[True], growing), DECAY + 2, False)
    expected = [min(0.7, 0.7 * call / DECAY) for call in range(DECAY + 2)]
    assert [wd for _, wd in used] == pytest.approx(expected, abs=1e-9)


def sgd_step(config: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters, how a step moves them, and their clipped gradients, by name."""
    with open_policy(config, init_reference_model=False) as policy:
        start = {name: p.detach().clone() for name, p in policy.named_parameters()}
        policy.train(own_share(policy, DATA), LOSSES["token"](), mbs=1)
        moved = {name: p.detach() - start[name] for name, p in policy.named_parameters()}
        grads = {name: p.main_grad.clone() for name, p in policy.named_parameters()}
        return {"start": start, "moved": moved, "grads": grads}


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_sgd_moves_against_the_clipped_gradient_to_which_weight_decay_is_added(
    ranks, checkpoints, decay: float
) -> None:
    sgd = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9, "weight_decay": decay}}
    constant = {"start_weight_decay": decay, "end_weight_decay": decay}
    config = policy_config(checkpoints[True], sgd | {"scheduler": constant})
    del config["megatron_cfg"]["optimizer"]["use_distributed_optimizer"]  # by default off for SGD
    (seen,) = ranks.run(1, sgd_step, config)
    # fp32 gradients are clipped in place, in the buffer that the optimizer reads.
    norm = math.sqrt(sum(float(g.pow(2).sum()) for g in seen["grads"].values()))
    assert norm == pytest.approx(oracle.CLIP, rel=1e-4)
    for name, moved in seen["moved"].items():
        matrix = "norm" not in name and not name.endswith("bias")
        gradient = seen["grads"][name] + (decay * seen["start"][name] if matrix else 0.0)
        torch.testing.assert_close(moved, -oracle.LR * gradient, rtol=0, atol=1e-7)


def step(config: dict[str, Any]) -> list[torch.Tensor]:
    """The loss and the gradient norm of a step, and the weights after it."""
    with open_policy(config, init_reference_model=False) as policy:
        result = policy.train(own_share(policy, DATA), LOSSES["token"](), mbs=1)
        return [
            result["loss"],
            result["grad_norm"],
            *(p.detach().clone() for _, p in policy.named_parameters()),
        ]


@pytest.mark.parametrize("optimizer", ["distributed", "whole"])
def test_gradients_are_sums_however_the_host_averages(ranks, checkpoints, optimizer: str) -> None:
    """Losses are divided by the global batch's counts: nothing is left to average."""
    base = OVERLAPPED if optimizer == "distributed" else LAYOUTS["DP2"].megatron
    seen = []
    for average in (False, True):
        ddp = {"distributed_data_parallel_config": {"average_in_collective": average}}
        config = policy_config(checkpoints[True], merged(base, ddp))
        seen.append(ranks.run(2, step, config))
    for summed, averaged in zip(*seen, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(summed, averaged, strict=True))
    exact = oracle.train(checkpoints[True], DATA, GLOBAL_BATCH, oracle.token_level)
    assert seen[1][0][1].item() == pytest.approx(exact.grad_norms[0], rel=1e-5)


def count_returns(config: dict[str, Any]) -> list[str]:
    """What happens in a step, in its order."""
    happened = []
    with open_policy(config, init_reference_model=False) as policy:
        optimizer = policy._engine.trainable.optimizer

        def noting(name: str) -> Any:
            return lambda old: lambda *args: (happened.append(name), old(*args))[1]

        with (
            replaced(trainable, "return_unused", noting("unused memory given back")),
            replaced(optimizer, "step_with_ready_grads", noting("parameters updated")),
        ):
            policy.train(own_share(policy, DATA), LOSSES["token"](), mbs=2)
    return happened


@pytest.mark.parametrize("level", [0, 1, 2])
def test_unused_memory_is_given_back_before_the_update_and_after_it(
    ranks, checkpoints, level: int
) -> None:
    given, updated = "unused memory given back", "parameters updated"
    config = policy_config(checkpoints[True], {"empty_unused_memory_level": level})
    wanted = [[updated], [given, updated], [given, updated, given]][level]
    assert ranks.run(1, count_returns, config) == [wanted]
