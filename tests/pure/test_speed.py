"""Figures of speed: what is counted, what devices can do, and how times are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import timing
from megatron_policy.device.timing import Stopwatch
from megatron_policy.estimate.devices import DEVICES, figures_of
from megatron_policy.estimate.flops import model_flops
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.packing.microbatch import (
    Microbatch,
    empty_microbatch,
    packed_microbatch,
    padded_microbatch,
)
from megatron_policy.packing.multiples import Multiples
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.speed import Estimator, Share, Workload, merge_speeds
from tests.pure.test_rows import model

COST = sequence_cost(model(hidden_size=8, ffn_hidden_size=24))
WIDTH = 12
LENGTHS = [[12, 3, 5], [7], []]
MULTIPLES = Multiples(row=8, sequence=2, context_ranks=1)


def rows_of(lengths: list[int]) -> BatchedDataDict:
    tokens = torch.ones(len(lengths), WIDTH, dtype=torch.long)
    return BatchedDataDict({"input_ids": tokens, "input_lengths": torch.tensor(lengths)})


def estimator_of(*, alike: bool, mtp_depth: int = 0, **axes: int) -> Estimator:
    topology = Topology(dp=len(LENGTHS), **axes)
    return Estimator(model(), topology, COST, dummy=8, alike=alike, mtp_depth=mtp_depth)


def packed(lengths: list[int]) -> list[Microbatch]:
    """A microbatch of each row."""
    rows = rows_of(lengths)
    return [
        packed_microbatch(rows.slice(n, n + 1), WIDTH, [length], MULTIPLES)
        for n, length in enumerate(lengths)
    ]


def test_dummies_and_padding_count_as_positions_and_not_as_tokens() -> None:
    estimator = estimator_of(alike=False, pp=2)
    cut = [packed(lengths) for lengths in LENGTHS]
    shares = [estimator.share(rows_of(own), each) for own, each in zip(LENGTHS, cut, strict=True)]
    assert [Share.of(share) for share in shares] == shares
    found = estimator.workload(shares, 4)
    dummy = empty_microbatch(WIDTH, MULTIPLES)
    filled = [each + [dummy] * (4 - len(each)) for each in cut]
    positions = [sum(m.layout.sources_CTR.numel() for m in each) for each in filled]
    assert found.tokens == 27 and found.positions == sum(positions)
    assert found.packing_efficiency == 27 / sum(positions)
    costs = [sum(COST(s.length) for m in each for s in m.layout.segments) for each in filled]
    assert found.data_parallel_imbalance == pytest.approx(max(costs) / (sum(costs) / 3))
    assert estimator.flops(found, 20, trained=True) == model_flops(
        model(), [n for own in LENGTHS for n in own], 20
    )


def test_padded_dummies_are_as_long_as_the_ranks_own_microbatches() -> None:
    estimator = estimator_of(alike=True)
    rows = rows_of([12, 3])
    share = estimator.share(rows, [padded_microbatch(rows, WIDTH, WIDTH, MULTIPLES)])
    assert share.tokens == 15 and share.positions == 2 * 16
    found = estimator.workload([share, share], 3)
    assert found.positions == 2 * 3 * 32 and found.data_parallel_imbalance == 1.0
    rows.pop("input_lengths")  # then they are text throughout
    assert estimator.share(rows, []).tokens == 2 * WIDTH


@pytest.mark.parametrize(("pp", "vpp", "count"), [(1, 1, 4), (2, 1, 4), (4, 1, 8), (4, 3, 8)])
def test_the_bubble_is_the_schedules_share_of_idle_turns(pp: int, vpp: int, count: int) -> None:
    estimator = estimator_of(alike=True, pp=pp, vpp=vpp)
    share = Share(count, 1, 1, 1.0, 1, 2)
    one = estimator.workload([share], count)
    # A stage computes for m turns, and waits for those of the other stages, 1 / vpp as long each.
    wait = (pp - 1) / vpp
    assert one.pipeline_bubble == pytest.approx(wait / (count + wait))
    assert (one + one).pipeline_bubble == pytest.approx(one.pipeline_bubble)


def test_global_batches_add_up() -> None:
    total = Workload(3, 4, 5, 9, 8.0, 6.0, 2, 1) + Workload(1, 4, 5, 10, 4.0, 4.0, 1, 1)
    assert total == Workload(4, 8, 10, 19, 12.0, 10.0, 3, 2)
    assert total.packing_efficiency == 0.5 and total.data_parallel_imbalance == 1.2
    assert Workload().packing_efficiency == 0 and Workload().data_parallel_imbalance == 1


def test_the_driver_reports_the_slowest_rank() -> None:
    ranks = [
        {"seconds": 2.0, "step_seconds": 0.5, "tokens": 8, "tokens_per_second": 4.0},
        {"seconds": 4.0, "step_seconds": 0.1, "tokens": 8, "tokens_per_second": 2.0},
    ]
    slowest = {"seconds": 4.0, "step_seconds": 0.5, "tokens": 8, "tokens_per_second": 2.0}
    assert merge_speeds(ranks) == merge_speeds(ranks[::-1]) == slowest


def test_figures_are_known_by_the_drivers_name_only() -> None:
    assert figures_of("NVIDIA H200") == DEVICES["NVIDIA H200"]
    assert figures_of("CPU x86_64") is figures_of("NVIDIA H100") is None
    for each in DEVICES.values():
        # Operations for each byte from memory: of all these between 100 and 400.
        assert 100 < each.bf16_flops / each.memory_bandwidth < 400
        assert 40 * 2**30 <= each.memory_bytes < 200 * 2**30


def test_a_stopwatch_adds_up_what_it_timed_until_it_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([1.0, 3.0, 10.0, 10.5, 20.0, 21.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch()
    with watch.timing("a"):
        pass
    with pytest.raises(ArithmeticError), watch.timing("a"):
        raise ArithmeticError
    with watch.timing("b"):
        pass
    assert (watch.seconds("a"), watch.seconds("b"), watch.seconds("c")) == (2.5, 1.0, 0.0)
    watch.restart()
    assert watch.seconds("a") == 0


def test_on_a_gpu_a_stopwatch_records_events_and_reads_them_only_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("record")

        def elapsed_time(self, end: Any) -> float:
            assert isinstance(end, Event)
            said.append("read")
            return 1500.0

    monkeypatch.setattr(timing, "is_accelerated", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch()
    with watch.timing("a"):
        said.append("work")
    assert said == ["record", "work", "record"]
    assert watch.seconds("a") == 1.5 and said[3:] == ["read"]
