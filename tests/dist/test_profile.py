"""A profile: the trace of each rank, the passes of all ranks on one clock, and the summary. What a
call reports of its speed: counts follow from the data and the layout, times add up, and nothing is
exchanged for it.
"""

from __future__ import annotations

import gzip
import json
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device.profiling import device_name
from megatron_policy.device.timing import BACKWARD, FORWARD, TRAINING, TimeSpan
from megatron_policy.errors import ConfigError
from megatron_policy.estimate.devices import figures_of
from megatron_policy.estimate.flops import model_flops
from megatron_policy.estimate.schedule import Pass, Schedule
from megatron_policy.estimate.timeline import Timeline, Track, read_trace, trace_events
from megatron_policy.policy import MegatronPolicy
from megatron_policy.policy.profiling import Profile
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.training import train
from megatron_policy.training.sync_microbatches import cut_together
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy, own_share, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, LENGTH, SIZES, VOCAB, layout
from tests.dist.resuming import replaced
from tests.dist.shortcuts import packed
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("PP2", marks=pytest.mark.daily),
        "PP2xVPP2",
        pytest.param("FSDP2 x 2", marks=pytest.mark.daily),
    ],
)
def test_ranks_record_the_passes_of_their_stage_in_the_expected_order(
    ranks, checkpoints, tmp_path, name: str
) -> None:
    megatron = (LAYOUTS | FSDP2_LAYOUTS)[name].megatron
    config = policy_config(checkpoints[True], megatron)
    profiles = ranks.run(2, profiled, config, tmp_path, False)
    assert profiles[0].summary == profiles[1].summary
    timeline, stages = profiles[0].timeline, megatron.get("pipeline_model_parallel_size", 1)
    assert timeline is not None and timeline.microbatches == GLOBAL_BATCH * stages // 2
    schedule = Schedule(stages, timeline.chunks, timeline.microbatches)
    for track in timeline.tracks:
        assert track.stage < stages
        recorded = [Pass(s.name == BACKWARD, s.microbatch or 0, s.chunk) for s in track.passes]
        assert recorded == schedule.order(track.stage)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"summary.json", "summary.txt", "timeline.json", "timeline.svg"}
    if stages > 1:
        first, last = (track.passes[0] for track in timeline.tracks)
        assert first.end <= last.begin
        assert all(0 < share < 1 for share in timeline.waiting().values())


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


BATCHES = 2
DATA = oracle.make_batch(BATCHES * GLOBAL_BATCH, LENGTH, VOCAB, seed=3)
TOKENS = int(DATA["input_lengths"].sum())
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "PP2xVPP2": (2, layout(2, pp=2, vpp=2).megatron, {}),
    "PP2xDP2, packed": (4, layout(4, pp=2).megatron, packed(20)),
    "TP2xCP2+SP": (4, LAYOUTS["TP2xCP2+SP"].megatron, {}),
}


def measured(config: dict[str, Any]) -> dict[str, Any]:
    """The speed of each kind of call, and what it has to be counted from."""
    with open_policy(config, init_reference_model=False) as policy:
        share = DATA.shard_by_batch_size(policy.topology.dp, batch_size=GLOBAL_BATCH)
        own = share[policy.coords.dp]
        trained = policy.train(own, TokenNLL())
        evaluated = policy.train(own, TokenNLL(), eval_mode=True)
        policy.accumulator.begin(TokenNLL())
        half = own.size // 2
        for part in (own.slice(0, half), own.slice(half, own.size)):
            policy.accumulator.microbatch(part)
        in_parts = policy.accumulator.finish()
        lengths = DATA["input_lengths"].tolist()
        predicted = sum(trained["valid_tokens"])
        return {
            "results": (trained, evaluated, in_parts),
            "flops": model_flops(policy._engine.table.architecture, lengths, int(predicted)),
            "collectives": collectives(policy, own),
        }


def collectives(policy: MegatronPolicy, own: BatchedDataDict) -> int:
    """How many it takes to cut a batch together."""
    calls: list[str] = []

    def counting(call: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(call.__name__), call(*args, **kwargs))[1]

    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list"):
            stack.enter_context(replaced(dist, name, counting))
        stack.enter_context(replaced(dist, "barrier", counting))
        cut = partial(train._cut, policy._training, own, TokenNLL(), GLOBAL_BATCH, 1)
        cut_together(cut, policy._batcher, policy._engine.groups.dp)
    return len(calls)


@pytest.mark.parametrize("name", CASES)
def test_speed_is_counted_from_data_and_layout_and_times_add_up(ranks, checkpoint, name) -> None:
    world, megatron, top = CASES[name]
    config = policy_config(checkpoint("qwen2", **SIZES), megatron, **top)
    found = ranks.run(world, measured, config)
    for rank in found:
        assert rank["collectives"] == 2  # one says that no rank refuses, one what each will run
        for result, first in zip(rank["results"], found[0]["results"], strict=True):
            speed = result["speed"]
            assert counts(speed) == counts(first["speed"])
            check_times(speed)
        trained, evaluated, in_parts = (result["speed"] for result in rank["results"])
        assert trained["model_flops"] == in_parts["model_flops"] == rank["flops"]
        assert evaluated["model_flops"] * 3 == trained["model_flops"]
        assert evaluated["step_seconds"] == evaluated["reduce_seconds"] == 0
        assert min(trained["step_seconds"], trained["reduce_seconds"]) > 0
        assert min(in_parts["step_seconds"], in_parts["reduce_seconds"]) > 0
        known = figures_of(device_name()) is not None
        assert ("mfu" in trained) == known, "no figures are known of a CPU"
        run = rank["results"][0]["microbatch_metrics"]["lr"]
        check_efficiency(name, trained, len(run))


def counts(speed: dict[str, float]) -> dict[str, float]:
    """What is the same on every rank."""
    times = ("second", "peak")
    return {key: value for key, value in speed.items() if not any(word in key for word in times)}


def check_times(speed: dict[str, float]) -> None:
    parts = ("forward_backward_seconds", "reduce_seconds", "step_seconds")
    assert speed["forward_backward_seconds"] > 0
    assert sum(speed[part] for part in parts) <= speed["seconds"]
    assert speed["tokens"] == TOKENS
    assert speed["tokens_per_second"] == TOKENS / speed["seconds"]
    assert ("peak_resident_bytes" in speed) != ("peak_memory_bytes" in speed)
    assert max(speed.get(f"peak_{kind}_bytes", 0) for kind in ("resident", "memory")) > 0


def check_efficiency(name: str, speed: dict[str, float], microbatches: int) -> None:
    """`microbatches` are those that this rank has run, of both batches, without dummies."""
    efficiency, imbalance = speed["packing_efficiency"], speed["data_parallel_imbalance"]
    if name == "PP2xDP2, packed":
        assert efficiency > 0.9 and 1 < imbalance < 2
        turns = BATCHES / speed["pipeline_bubble"] - BATCHES  # of both batches together
        assert turns == pytest.approx(round(turns)) and turns >= microbatches
        return
    # Padded rows are one microbatch each, as wide as the layout needs.
    width = 16 if name == "TP2xCP2+SP" else LENGTH
    assert efficiency == TOKENS / (BATCHES * GLOBAL_BATCH * width)
    assert imbalance == 1
    chunks = 2 if name == "PP2xVPP2" else 0
    assert speed["pipeline_bubble"] == (1 / (GLOBAL_BATCH * chunks + 1) if chunks else 0)


def reported(config: dict[str, Any], root: Path) -> Any:
    """The reports of a save, of one in the background, and of a refit."""
    with open_policy(config, init_reference_model=False) as policy:
        waits = not config["megatron_cfg"].get("checkpoint")
        saved = policy.save_checkpoint(root / "weights", root / "optimizer")
        assert (saved is not None) == waits
        finished = policy.finalize_async_save()
        assert (finished is None) == waits
        manifest = policy.refit(HfDirectory(root / "hf"))
        return saved or finished, manifest.speed


@pytest.mark.parametrize("background", [False, True])
def test_saves_and_refits_report_bytes_seconds_and_their_rate(
    ranks, checkpoint, tmp_path, background: bool
) -> None:
    path = checkpoint("qwen2", **SIZES)
    config = policy_config(path, {"checkpoint": {"async_save": True}} if background else {})
    found = ranks.run(2, reported, config, tmp_path)
    written = [
        file
        for part in ("weights", "optimizer")
        for file in (tmp_path / part).rglob("*")
        if file.is_file() and file.parent != tmp_path / part
    ]
    on_disk = sum(file.stat().st_size for file in written)
    for saved, sent in found:
        assert saved.step == 0 and saved.total_bytes == found[0][0].total_bytes
        assert saved.total_bytes == on_disk
        assert saved.bytes_per_second == saved.total_bytes / saved.seconds > 0
        assert sent["bytes_per_second"] * sent["seconds"] == pytest.approx(sent["total_bytes"])
        assert sent["seconds"] > 0
    hf = sum(file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors"))
    assert 0.9 * hf < sum(sent["total_bytes"] for _, sent in found) < hf
