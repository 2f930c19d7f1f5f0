"""A training result in another process, and under the host's names."""

from __future__ import annotations

import pickle

import torch

from megatron_policy.hosts.nemo_rl.host_imports import rename_result
from megatron_policy.training.results import TrainResult

RESULT = TrainResult(
    loss=torch.tensor([2.0]),
    grad_norm=torch.tensor([1.0]),
    lr=0.1,
    microbatch_metrics={"loss": [1.5, 0.5]},
)


def test_it_crosses_processes() -> None:
    again = pickle.loads(pickle.dumps(RESULT))
    assert isinstance(again, TrainResult) and again.keys() == RESULT.keys()


def test_the_host_finds_its_own_names() -> None:
    found = rename_result(RESULT)
    assert type(found) is dict
    assert found["global_loss"] is RESULT["loss"]
    assert found["all_mb_metrics"] == {"loss": [1.5, 0.5]}
