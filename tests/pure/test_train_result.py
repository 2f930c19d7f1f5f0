"""A training result under its names, under those of the last release, and under the host's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_policy.hosts.nemo_rl.result_types import training_result
from megatron_policy.training.results import TrainResult

RESULT = TrainResult(
    loss=torch.tensor([2.0]),
    grad_norm=torch.tensor([1.0]),
    lr=0.1,
    microbatch_metrics={"loss": [1.5, 0.5]},
)


@pytest.mark.parametrize(
    ("old", "new"), [("global_loss", "loss"), ("all_mb_metrics", "microbatch_metrics")]
)
@pytest.mark.parametrize(
    "use",
    [
        lambda result, old: result[old],
        lambda result, old: result.get(old),
        lambda result, old: result.setdefault(old, "stale"),
        lambda result, old: (result | {"more": 1}).copy().pop(old),
        lambda result, old: old in result and result[result.RENAMED[old]],
    ],
    ids=["[]", "get", "setdefault", "pop", "in"],
)
def test_an_old_name_gives_the_same_and_warns_where_it_is_used(
    old: str, new: str, use: Callable[[TrainResult, str], Any]
) -> None:
    before = list(RESULT)
    with pytest.warns(DeprecationWarning, match=f"{old}.* is called .*{new}") as warned:
        assert use(RESULT, old) is RESULT[new]
    assert [warning.filename for warning in warned] == [__file__]
    assert list(RESULT) == before


def test_a_caller_may_use_an_old_name_for_something_else() -> None:
    own = TrainResult(RESULT)
    own["global_loss"] = "own"
    assert own["global_loss"] == own.get("global_loss") == own.pop("global_loss") == "own"
    assert "loss" in own


def test_a_name_that_never_was_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        RESULT["nothing"]
    assert "nothing" not in RESULT and RESULT.get("nothing", 7) == RESULT.pop("nothing", 7) == 7


def test_it_crosses_processes() -> None:
    again = pickle.loads(pickle.dumps(RESULT))
    assert isinstance(again, TrainResult) and again.keys() == RESULT.keys()


def test_the_host_finds_its_own_names() -> None:
    found = training_result(RESULT)
    assert type(found) is dict
    assert found["global_loss"] is RESULT["loss"]
    assert found["all_mb_metrics"] == {"loss": [1.5, 0.5]}
