"""Records of a training result, writers that fail, and reports that add results up."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping

import pytest
import torch

from megatron_policy.checkpoint.report import SaveReport
from megatron_policy.errors import ConfigError
from megatron_policy.monitoring.metrics_log import (
    KEPT_CALLS,
    MetricsLog,
    checked_metrics,
    merge_microbatches,
    training_record,
)
from megatron_policy.monitoring.report import MemoryUse, PolicyReport
from megatron_policy.training.results import TrainResult

SPEED = {
    "seconds": 2.0,
    "forward_backward_seconds": 1.0,
    "reduce_seconds": 0.25,
    "step_seconds": 0.25,
    "tokens": 100.0,
    "tokens_per_second": 50.0,
    "packing_efficiency": 0.5,
    "data_parallel_imbalance": 1.0,
    "pipeline_bubble": 0.25,
}
RESULT = TrainResult(
    loss=torch.tensor([2.0, 1.0]),
    grad_norm=torch.tensor([3.0]),
    lr=0.5,
    weight_decay=0.125,
    valid_sequences=[2.0, 2.0],
    valid_tokens=[30.0, 34.0],
    microbatch_metrics={"kl": [0.25, 0.5], "lr": [0.5, 0.5], "ratio_max": [1.5, 2.5]},
    moe_metrics={"share": 0.75},
    speed=SPEED,
    step=7,
)


class Kept:
    """A writer that keeps its records, and raises at the steps that it is told."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.closed = bad, 0
        self.records: list[tuple[int, Mapping[str, float]]] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step in self.bad:
            raise OSError(f"disk full at {step}")
        self.records.append((step, metrics))

    def close(self) -> None:
        self.closed += 1


def test_a_record_joins_global_batches_and_the_microbatches_of_all_ranks() -> None:
    other = {"kl": [1.0], "ratio_min": [0.5, 0.25], "note": ["text"]}
    joined = merge_microbatches([RESULT["microbatch_metrics"], other])
    record = training_record(RESULT, joined, eval_mode=False)
    expected = {
        "train/loss": 1.5,
        "train/grad_norm": 3.0,
        "train/lr": 0.5,
        "train/weight_decay": 0.125,
        "train/valid_sequences": 4.0,
        "train/valid_tokens": 64.0,
        "loss/kl": 1.75,
        "loss/ratio_max": 2.5,
        "loss/ratio_min": 0.25,
        "moe/share": 0.75,
    }
    assert record == expected | {f"speed/{name}": value for name, value in SPEED.items()}


def test_an_evaluation_is_recorded_under_names_of_its_own_and_is_not_in_the_speed() -> None:
    writer = Kept()
    log = MetricsLog([writer])
    log.trained(RESULT, {"kl": [0.5]}, eval_mode=True)
    (found,) = writer.records
    names = ("eval/loss", "eval/valid_sequences", "eval/valid_tokens", "eval_loss/kl")
    assert found == (7, dict(zip(names, (1.5, 4.0, 64.0, 0.5), strict=True)))
    assert not log.speeds


def test_a_writer_that_raises_is_closed_and_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Kept(2, 3), Kept()
    log = MetricsLog([bad, good])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            log.write(step, {"a": 1.0})
    assert [step for step, _ in good.records] == [1, 2, 3]
    assert [step for step, _ in bad.records] == [1] and bad.closed == 1
    (warning,) = caplog.records
    assert "Kept could not write the metrics of step 2" in warning.getMessage()
    assert "disk full at 2" in warning.getMessage()
    log.close()
    assert (bad.closed, good.closed) == (1, 1)


def test_a_save_is_recorded_once_however_often_it_reports() -> None:
    writer, report = Kept(), SaveReport(step=5, total_bytes=100, seconds=4.0)
    log = MetricsLog([writer])
    for each in (None, report, report):
        log.saved(each)
    numbers = {"total_bytes": 100, "seconds": 4.0, "bytes_per_second": 25.0}
    assert writer.records == [(5, {f"checkpoint/{name}": n for name, n in numbers.items()})]


def test_a_callers_metrics_are_numbers() -> None:
    given = {"a": torch.tensor(0.5), "b": 2, "c": math.inf}
    assert checked_metrics(given) == {"a": 0.5, "b": 2.0, "c": math.inf}
    for wrong in ({"a": "1"}, {"a": torch.ones(2)}, {"a": None}, {1: 1.0}):
        with pytest.raises(ConfigError, match="metrics are numbers by name"):
            checked_metrics(wrong)  # type: ignore[arg-type]


def memory(size: int, expected: int | None = None) -> MemoryUse:
    return MemoryUse(size, 2 * size, 3 * size, 0, 0, expected, 9 * size)


def test_a_report_adds_up_the_last_calls() -> None:
    log = MetricsLog()
    for seconds in [100.0, *[1.0] * (KEPT_CALLS - 1), 3.0]:
        speed = SPEED | {"seconds": seconds, "mfu": 0.5 / seconds}
        log.trained(TrainResult(RESULT | {"speed": speed}), None, eval_mode=False)
    found = PolicyReport.of_rank(21, memory(1), tuple(log.speeds))
    assert found.speed is not None and found.balance is not None
    assert (found.speed.calls, found.speed.seconds) == (KEPT_CALLS, KEPT_CALLS + 2)
    assert found.speed.tokens_per_second == 100.0 * KEPT_CALLS / (KEPT_CALLS + 2)
    assert found.speed.mfu == pytest.approx(0.5 * KEPT_CALLS / (KEPT_CALLS + 2))
    assert found.balance.packing_efficiency == 0.5
    assert json.loads(json.dumps(found.as_dict()))["speed"]["calls"] == KEPT_CALLS


def test_a_report_of_several_ranks_has_most_and_least_and_the_slowest_rank() -> None:
    fast, slow = (PolicyReport.of_rank(3, memory(n), [SPEED | {"seconds": n}]) for n in (10, 40))
    found = PolicyReport.merged([fast, slow])
    assert (found.ranks, found.step, found.speed) == (2, 3, slow.speed)
    assert (found.memory, found.memory_least) == (slow.memory, fast.memory)
    table = str(found)
    assert max(map(len, table.splitlines())) <= 80
    assert table.splitlines()[4] == "  optimizer                    120 B      30 B"
    assert "activations" not in table and "not known" in table
    assert "nothing was trained yet" in str(PolicyReport.of_rank(0, memory(1, 5), ()))


@pytest.mark.parametrize("name", ["seconds", "step_seconds", "tokens"])
def test_a_number_that_a_call_has_not_reported_is_not_taken_for_zero(name: str) -> None:
    lacking = {key: value for key, value in SPEED.items() if key != name}
    for speeds in ([SPEED, lacking], [lacking, SPEED]):
        with pytest.raises(KeyError, match=name):
            PolicyReport.of_rank(2, memory(1), speeds)
