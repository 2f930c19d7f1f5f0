"""Errors reach the driver as they were raised; without processes."""

import pickle

import pytest

from megatron_policy.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    ConversionError,
    LossError,
    RefitError,
    TransitionError,
    WorkerError,
)

KINDS = (BatchError, ConfigError, ConversionError, CheckpointError, LossError, RefitError)


@pytest.mark.parametrize("kind", [*KINDS, TransitionError])
def test_errors_survive_pickling(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("what and how to fix it")))
    assert type(again) is kind
    assert str(again) == "what and how to fix it"


def test_a_worker_error_keeps_rank_and_cause_through_pickling() -> None:
    again = pickle.loads(pickle.dumps(WorkerError("rank 3 failed", rank=3, cause="ValueError: x")))
    assert (str(again), again.rank, again.cause) == ("rank 3 failed", 3, "ValueError: x")
