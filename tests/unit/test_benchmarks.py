"""The benchmarks' own arithmetic and results; what they measure is not measured here."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import checkpoint_once, collectives_once, lockstep, packing
from benchmarks.checkpointing import PAIRS
from benchmarks.checkpoints import Size, write_checkpoint
from benchmarks.export_once import flat_buffer, verify
from benchmarks.floor import copy_weights, hf_views
from benchmarks.processes import run_fresh, run_ranks
from benchmarks.results import HIGHER, Measurement, Row, line_of, meets, ratio_of_minima, summary
from benchmarks.run import main
from benchmarks.scorecard import SCORECARD, chosen
from megatron_policy.converters.formats.hf_files import HfReader, read_config
from megatron_policy.converters.formats.hf_names import SINGLE
from megatron_policy.converters.rows import pack
from megatron_policy.converters.table import bind
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.refit.buffers import BufferSlice, align
from megatron_policy.refit.plan import RefitTensor
from tests.pure.test_rows import model

MEASURED = Row(1, "ours / floor", limit=1.0, goal=2.0, measure=lambda folder, repetitions: SLOW)
SLOW = Measurement(1.5, {"floor": (0.5, 0.4), "ours": (0.6, 0.75)}, "all bits")
TINY = Size(hidden=32, ffn=48, layers=2, heads=4, groups=2, vocab=128)


def test_the_scorecard_has_its_rows_each_measured_or_with_a_reason_not_to_be() -> None:
    assert [row.number for row in SCORECARD] == [*range(1, 18), *range(20, 33)]
    for row in SCORECARD:
        assert (row.measure is None) == bool(row.skipped), row
    assert chosen(SCORECARD, None) == list(SCORECARD)
    assert [row.number for row in chosen(SCORECARD, [10, 3])] == [3, 10]
    with pytest.raises(ValueError, match=r"no row \[99\]"):
        chosen(SCORECARD, [1, 99])


def test_a_measured_line_has_the_ratio_and_the_least_cpu_seconds_of_each_program() -> None:
    line = json.loads(line_of(MEASURED, SLOW, 3.14159, {"torch": "2"}))
    assert line["row"] == 1
    assert (line["ratio"], line["limit"], line["goal"], line["met"]) == (1.5, 1.0, 2.0, True)
    assert line["cpu_s"] == {"floor": 0.4, "ours": 0.6}
    assert line["runs"] == {"floor": [0.5, 0.4], "ours": [0.6, 0.75]}
    assert line["load_average"] == 3.14
    assert line["verified"] == "all bits"
    assert line["made_with"] == {"torch": "2"}
    assert not line.keys() & {"skipped", "beside"}
    beside = line_of(MEASURED, replace(SLOW, beside={"in turn": 0.5}))
    assert json.loads(beside)["beside"] == {"in turn": 0.5}
    assert summary(beside).endswith("; in turn 0.5")


def test_a_skipped_line_has_no_numbers_and_the_reason() -> None:
    row = replace(MEASURED, measure=None, skipped="arrives with refit")
    line = json.loads(line_of(row))
    assert (line["row"], line["limit"], line["goal"]) == (1, 1.0, 2.0)
    assert line["skipped"] == "arrives with refit"
    assert line["ratio"] is line["cpu_s"] is line["load_average"] is None
    with pytest.raises(AssertionError, match="row 1"):
        line_of(replace(row, skipped=""))


def test_a_step_is_as_efficient_as_its_tokens_and_its_slowest_rank() -> None:
    work = packing.Work
    assert packing.efficiency([work(10, 4.0), work(10, 4.0)], [9, 9]) == 0.9
    assert packing.efficiency([work(9, 4.0), work(9, 2.0)], [9, 9]) == 0.75


def test_ranks_that_wait_in_every_microbatch_take_as_long_as_the_costliest_of_each() -> None:
    assert lockstep.efficiency([[3.0, 1.0], [1.0, 3.0]]) == 4.0 / 6.0
    assert lockstep.efficiency([[3.0, 1.0], [3.0, 1.0]]) == 1.0
    assert lockstep.efficiency([[3.0, 1.0], [1.0, 3.0]], group=1) == 1.0


def test_no_plan_of_a_few_sequences_exceeds_the_bound_of_lockstep_efficiency(monkeypatch) -> None:
    """All plans of seven sequences on two ranks with two microbatches each are tried."""
    monkeypatch.setattr(lockstep, "RANKS", 2)
    monkeypatch.setattr(lockstep, "CAPACITY", 100)
    monkeypatch.setattr(lockstep, "COST", sequence_cost(model(hidden_size=20)))
    draw, best = [95, 40, 30, 30, 25, 20, 20], 0.0
    for places in product(range(4), repeat=len(draw)):
        bins = [[n for n, at in zip(draw, places, strict=True) if at == b] for b in range(4)]
        if all(sum(own) <= 100 for own in bins):
            costs = [sum(map(lockstep.COST, own)) for own in bins]
            best = max(best, lockstep.efficiency([costs[:2], costs[2:]]))
    assert 0.9 * lockstep.bound(draw) < best <= lockstep.bound(draw) < 1.0


@pytest.mark.nightly
def test_ranks_keep_pace_within_a_twentieth_of_what_is_possible(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lockstep, "MANY", 512)  # of these only the time is taken
    found = lockstep.lockstep_efficiency(tmp_path, 3)
    assert 0.95 <= found.ratio <= 1.0
    for name, rows in product(lockstep.LENGTHS, lockstep.ROWS):
        kind = f"{rows} rows of median {name}"
        if found.beside[f"{kind}, at most"] > 0.98:
            assert found.beside[kind] >= 0.95, kind


def test_the_ratio_compares_the_best_runs_of_both() -> None:
    assert ratio_of_minima((3.0, 9.0, 4.0), (8.0, 2.0)) == 1.5


def test_a_goal_is_met_on_the_better_side_of_it_and_the_summary_says_so() -> None:
    ratios = (1.9, 2.0, 2.1)
    assert [meets(MEASURED, ratio) for ratio in ratios] == [True, True, False]
    higher = replace(MEASURED, better=HIGHER)
    assert [meets(higher, ratio) for ratio in ratios] == [False, True, True]
    missed = summary(line_of(replace(MEASURED, goal=1.2), SLOW))
    assert "1.500 (goal <= 1.2, limit 1) MISSED" in missed
    assert "goal >= 1.2, limit 1) met" in summary(line_of(replace(higher, goal=1.2), SLOW))


@pytest.mark.nightly
def test_each_run_overwrites_the_results_with_one_object_a_line(tmp_path: Path) -> None:
    """Of rows that are planned for 32 ranks, which lose at most two hundredths of a step."""
    results = tmp_path / "results.jsonl"
    for numbers in (["11"], ["11", "9"]):
        main(["--rows", *numbers, "--results", str(results)])
    planned, skipped = (json.loads(line) for line in results.read_text().splitlines())
    assert (planned["row"], skipped["row"]) == (9, 11)
    assert planned["ratio"] >= 0.98
    assert planned["ratio"] <= planned["beside"]["balanced"] <= 1.0
    assert planned["beside"]["bins dealt in turn"] < 0.9


def test_fewer_than_three_repetitions_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--repetitions", "2"])
    assert "at least 3" in capsys.readouterr().err


def test_the_floors_of_import_and_export_have_the_bits_of_the_table(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", replace(TINY, layers=3))
    config = json.loads((path / "config.json").read_text())
    copied, table = copy_weights(path / SINGLE, config), bind(read_config(path))
    assert copied.keys() == {entry.megatron for entry in table.exported()}
    views = dict(hf_views({n: as_parameter(n, weight) for n, weight in copied.items()}, config))
    assert views.keys() == table.hf_shapes().keys()
    with HfReader(path) as reader:
        for entry in table.exported():
            parts = [reader.tensor(name) for name in entry.hf]
            expected = pack(entry.row, table.architecture, parts)
            assert torch.equal(copied[entry.megatron].view(expected.shape), expected), entry
        for name, shape in table.hf_shapes().items():
            assert torch.equal(views[name].reshape(shape), reader.tensor(name)), name


def as_parameter(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight of the floor of the import in the shape of Megatron-Core's parameter."""
    if "linear_qkv" in name:
        return weight.flatten(0, 2)
    return weight.flatten(0, 1) if "linear_fc1" in name else weight


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_each_rank_that_exports_counts_the_calls_of_all_groups(ranks, tmp_path, tp, pp) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", replace(TINY, tied=False))
    counts = ranks.run(2, collectives_once.main, path, tp, pp)
    once = {"private groups": 1}
    assert [count["calls"] for count in counts] == [
        {"first": once, "again": once, "agreement": {}}
    ] * 2
    assert {count["tensors"] for count in counts} == {2 * 12 + 3}


def test_a_call_that_goes_through_torch_distributed_is_counted_as_such() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with collectives_once.counted() as calls:
            dist.broadcast(torch.zeros(1), 0)
            dist.all_gather([torch.zeros(1)], torch.zeros(1))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert calls == {"torch.distributed": 2}


def test_an_export_that_lacks_a_tensor_or_changes_one_is_an_error(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", TINY)
    target, end, placed = flat_buffer(path), 0, []
    with HfReader(path) as reader:
        for name, shape in reader.shapes.items():
            tensor, place = RefitTensor(name, shape, torch.bfloat16, 0), BufferSlice(target, end)
            place.tensor(shape, torch.bfloat16).copy_(reader.tensor(name))
            placed.append((tensor, place))
            end += align(tensor.nbytes)
    assert end == target.memory.numel()
    verify(path, placed)
    with pytest.raises(RuntimeError, match="not exported"):
        verify(path, placed[1:])
    target.memory[placed[2][1].offset] ^= 1
    with pytest.raises(RuntimeError, match=f"{placed[2][0].name} was not exported faithfully"):
        verify(path, placed)


def test_a_program_or_rank_that_fails_ends_the_others_and_says_why() -> None:
    for call in (
        lambda: run_fresh("benchmarks.absent", "one"),
        lambda: run_ranks(2, "benchmarks.absent"),
    ):
        with pytest.raises(RuntimeError, match=r"No module named benchmarks\.absent"):
            call()
    with pytest.raises(RuntimeError, match=r"rank 0 took over 0\.1 s"):
        run_ranks(2, "timeit", "-n1", "-r1", "import time; time.sleep(60)", limit_s=0.1)


def test_tensors_on_a_gpu_are_written_from_a_buffer_of_the_host() -> None:
    buffer, host_bytes = checkpoint_once.BUFFER, checkpoint_once.host_bytes
    with FakeTensorMode(allow_non_fake_inputs=True):  # a GPU's tensor, of which numpy has no view
        tensor = torch.empty(buffer + 6, dtype=torch.bfloat16, device="cuda")
    assert [len(piece) for piece in host_bytes(tensor)] == [buffer, buffer, 12]
    own = torch.arange(5, dtype=torch.int16)
    (piece,) = host_bytes(own)
    assert piece == own.numpy().tobytes()
    own.zero_()
    assert not any(piece)


def test_saves_and_loads_are_timed_beside_plain_files_of_their_tensors(ranks, tmp_path) -> None:
    path, box = write_checkpoint(tmp_path / "checkpoint", TINY), tmp_path / "box"
    box.mkdir()
    (blocking,) = ranks.run(1, checkpoint_once.sync, path, box, 1)
    assert blocking["wall_s"].keys() == {*PAIRS, *PAIRS.values()}
    parameters = 128 * 32 + 32 + 2 * (32 * 64 + 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32)
    assert blocking["plain_bytes"] == 14 * parameters < blocking["bytes"]
    (beside,) = ranks.run(1, checkpoint_once.background, path, box, 2)
    assert {name: len(runs) for name, runs in beside["wall_s"].items()} == {
        "a step alone": 2,
        "a step beside": 2,
        "blocked by the first": 1,
        "until the first is there": 1,
        "blocked by a later one": 1,
        "until a later one is there": 1,
    }
