"""A profile: the trace of each rank, the passes of all ranks on one clock, and the summary."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.device.timing import BACKWARD, FORWARD, TRAINING, TimeSpan
from megatron_policy.errors import ConfigError
from megatron_policy.estimate.schedule import Pass, Schedule
from megatron_policy.estimate.timeline import Timeline, Track, read_trace, trace_events
from megatron_policy.policy.profiling import Profile
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy, own_share, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, LENGTH, VOCAB
from tests.losses import TokenNLL


def profiled(config: dict[str, Any], folder: Path, operations: bool) -> Profile:
    """The profile of a step, in microbatches of a row."""
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    with open_policy(config, init_reference_model=False) as policy:
        policy.train(own_share(policy, data), TokenNLL(), mbs=1)
        with policy.profile(folder, operations=operations) as profile:
            policy.train(own_share(policy, data), TokenNLL(), mbs=1)
            with pytest.raises(ConfigError, match="open already"), policy.profile(folder):
                pass
        assert not policy._engine.recorder.on
        return profile


def is_inside(inner: TimeSpan, outer: TimeSpan) -> bool:
    return outer.begin <= inner.begin <= inner.end <= outer.end


@pytest.mark.nightly
def test_a_trace_of_one_rank_has_the_microbatches_in_order_inside_their_run(
    ranks, checkpoints, tmp_path
) -> None:
    config = policy_config(checkpoints[True], LAYOUTS["one process"].megatron)
    (profile,) = ranks.run(1, profiled, config, tmp_path, True)
    assert sorted(tmp_path.iterdir()) == sorted(profile.files)
    timeline = read_trace(json.loads((tmp_path / "timeline.json").read_text()))
    (track,) = timeline.tracks
    passes = [(span.name, span.microbatch) for span in track.passes]
    numbers = range(GLOBAL_BATCH)
    assert passes == [(name, number) for number in numbers for name in (FORWARD, BACKWARD)]
    assert all(one.end <= other.begin for one, other in pairwise(track.passes))
    names = [span.name for span in track.spans if span not in track.passes]
    assert names == [TRAINING, "reduce", "step"]
    run, reduce, step = (span for span in track.spans if span not in track.passes)
    assert all(is_inside(span, run) for span in [*track.passes, reduce])
    assert run.end <= step.begin
    with gzip.open(tmp_path / "rank_0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    named = [each["name"] for each in events if each.get("cat") == "user_annotation"]
    for name in (TRAINING, FORWARD, BACKWARD, "reduce", "step"):
        assert named.count(name) == sum(span.name == name for span in track.spans)
    assert profile.summary["steps"] == 1
    assert profile.summary["last_step"]["bubble_of_equal_stages"] == 0
    assert "aten::mm" in [each["name"] for each in profile.summary["slowest_operations"]]
    assert str(tmp_path / "timeline.svg") in str(profile)


@pytest.mark.parametrize("name", ["PP2", "PP2xVPP2"])
def test_stages_run_in_the_expected_order_and_the_last_begins_after_the_first(
    ranks, checkpoints, tmp_path, name: str
) -> None:
    layout = LAYOUTS[name]
    config = policy_config(checkpoints[True], layout.megatron)
    profiles = ranks.run(layout.world, profiled, config, tmp_path, False)
    assert profiles[0].summary == profiles[1].summary
    timeline = profiles[0].timeline
    assert timeline is not None
    schedule = Schedule(2, timeline.chunks, timeline.microbatches)
    for track in timeline.tracks:
        recorded = [Pass(s.name == BACKWARD, s.microbatch or 0, s.chunk) for s in track.passes]
        assert recorded == schedule.order(track.stage)
    first, last = (track.passes[0] for track in timeline.tracks)
    assert first.end <= last.begin
    assert all(0 < share < 1 for share in timeline.waiting().values())
    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.json", "summary.txt", "timeline.json", "timeline.svg",
    }  # fmt: skip


def test_ranks_of_fsdp_record_both_passes_of_each_of_their_microbatches(
    ranks, checkpoints, tmp_path
) -> None:
    layout = FSDP2_LAYOUTS["FSDP2 x 2"]
    config = policy_config(checkpoints[True], layout.megatron)
    timeline = ranks.run(layout.world, profiled, config, tmp_path, False)[0].timeline
    assert timeline is not None
    expected = Schedule(1, 1, GLOBAL_BATCH // layout.world).order(0)
    for track in timeline.tracks:
        assert track.stage == 0
        recorded = [Pass(s.name == BACKWARD, s.microbatch or 0, s.chunk) for s in track.passes]
        assert recorded == expected


def test_a_trace_names_every_rank_and_is_what_it_was_made_of() -> None:
    spans = (TimeSpan(FORWARD, 0.0, 0.5, 0), TimeSpan(BACKWARD, 0.5, 1.5, 0))
    later = (TimeSpan(FORWARD, 0.5, 0.75, 0, 1), TimeSpan("step", 2.0, 2.5))
    timeline = Timeline((Track(0, 0, spans), Track(4, 1, later)), 2, expected=False)
    data = json.loads(json.dumps(trace_events(timeline)))
    assert read_trace(data) == timeline
    kinds = {event["ph"] for event in data["traceEvents"]}
    assert kinds == {"M", "X"}
    names = {
        e["pid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {0: "rank 0, stage 0", 4: "rank 4, stage 1"}
    complete = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert all({"name", "cat", "ts", "dur", "pid", "tid", "args"} <= e.keys() for e in complete)
    assert [(e["name"], e["ts"], e["dur"]) for e in complete][2] == (
        "forward 0, chunk 1", 500_000.0, 250_000.0,
    )  # fmt: skip
