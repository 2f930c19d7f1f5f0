"""Keys around a step that change how it is done and not what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_policy.engines.megatron import trainable
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import LAYOUTS, LENGTH, OVERLAPPED, VOCAB
from tests.dist.resuming import merged, replaced


def step(config: dict[str, Any]) -> list[torch.Tensor]:
    """The loss and the gradient norm of a step, and the weights after it."""
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    with open_policy(config, init_reference_model=False) as policy:
        result = policy.train(own_share(policy, data), LOSSES["token"](), mbs=1)
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
    exact = oracle.train(
        checkpoints[True],
        oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB),
        GLOBAL_BATCH,
        oracle.token_level,
    )
    assert seen[1][0][1].item() == pytest.approx(exact.grad_norms[0], rel=1e-5)


def count_returns(config: dict[str, Any]) -> list[str]:
    """What happens in a step, in its order."""
    data, happened = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB), []
    with open_policy(config, init_reference_model=False) as policy:
        optimizer = policy._engine.trainable.optimizer

        def noting(name: str) -> Any:
            return lambda old: lambda *args: (happened.append(name), old(*args))[1]

        with (
            replaced(trainable, "return_unused", noting("unused memory given back")),
            replaced(optimizer, "step_with_ready_grads", noting("parameters updated")),
        ):
            policy.train(own_share(policy, data), LOSSES["token"](), mbs=2)
    return happened


@pytest.mark.parametrize("level", [0, 1, 2])
def test_unused_memory_is_given_back_before_the_update_and_after_it(
    ranks, checkpoints, level: int
) -> None:
    given, updated = "unused memory given back", "parameters updated"
    config = policy_config(checkpoints[True], {"empty_unused_memory_level": level})
    wanted = [[updated], [given, updated], [given, updated, given]][level]
    assert ranks.run(1, count_returns, config) == [wanted]
