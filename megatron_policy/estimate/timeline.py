"""The passes of a training step over microbatches, stage by stage: as a plan expects them, or as
ranks have recorded them; and as events of a Chrome trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_policy.device.timing import BACKWARD, FORWARD, TRAINING, TimeSpan
from megatron_policy.estimate.adapters import ModelAdapters
from megatron_policy.estimate.plan import StepPlan
from megatron_policy.estimate.schedule import Pass, Schedule
from megatron_policy.estimate.step_time import pass_seconds

PASSES = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class Track:
    """What one rank does; a plan has one for all ranks of a stage."""

    rank: int
    stage: int
    spans: tuple[TimeSpan, ...]

    @property
    def passes(self) -> list[TimeSpan]:
        """The spans that are passes over a microbatch."""
        return [span for span in self.spans if span.name in PASSES]

    @property
    def busy(self) -> float:
        """Seconds of all passes."""
        return sum(span.seconds for span in self.passes)


@dataclass(frozen=True)
class Timeline:
    """What ranks do at the same time, in seconds of one clock. Each stage has `chunks`."""

    tracks: tuple[Track, ...]
    chunks: int
    expected: bool
    """Whether a plan says so."""

    @property
    def microbatches(self) -> int:
        """How many the ranks pass over."""
        numbers = [span.microbatch or 0 for track in self.tracks for span in track.passes]
        return max(numbers, default=-1) + 1

    def waiting(self) -> dict[int, float]:
        """For each stage, the share of the time from the first pass of any rank to the last for
        which its ranks run no pass: 0 where there are none.
        """
        passes = [span for track in self.tracks for span in track.passes]
        if not passes:
            return {track.stage: 0.0 for track in self.tracks}
        whole = max(span.end for span in passes) - min(span.begin for span in passes)
        found: dict[int, list[float]] = {}
        for track in self.tracks:
            found.setdefault(track.stage, []).append(1 - track.busy / whole)
        return {stage: sum(shares) / len(shares) for stage, shares in sorted(found.items())}

    def last_step(self) -> Timeline:
        """The last run of the training schedule alone, with what follows it; itself if none was
        recorded.
        """
        tracks = []
        for track in self.tracks:
            runs = [span for span in track.spans if span.name == TRAINING]
            begin = runs[-1].begin if runs else 0.0
            spans = tuple(span for span in track.spans if span.begin >= begin)
            tracks.append(Track(track.rank, track.stage, spans))
        return Timeline(tuple(tracks), self.chunks, self.expected)


def expected_timeline(plan: StepPlan, microbatches: int | None = None) -> Timeline:
    """The passes of a step, or of so many of its microbatches, if every pass takes its least time
    and nothing is waited for but another stage's result. The clock begins at 0.
    """
    seconds = pass_seconds(
        plan.config,
        plan.architecture,
        ModelAdapters.of(plan.rows, plan.config.megatron_cfg.peft),
        plan.topology,
        plan.batch_shape,
        plan.device,
    )
    at = plan.topology
    schedule = Schedule.of(at, microbatches or plan.schedule.microbatches)
    per_stage = at.world_size // at.pp
    tracks = (
        Track(stage * per_stage, stage, tuple(spans))
        for stage, spans in enumerate(_simulated(schedule, seconds))
    )
    return Timeline(tuple(tracks), at.vpp, expected=True)


def _simulated(
    schedule: Schedule, seconds: Sequence[Sequence[tuple[float, float]]]
) -> list[list[TimeSpan]]:
    """The passes of each stage: each begins when the stage is free and its input has been made."""
    orders = [schedule.order(stage) for stage in range(schedule.pp)]
    spans: list[list[TimeSpan]] = [[] for _ in orders]
    done: dict[tuple[int, Pass], float] = {}
    while len(done) < sum(map(len, orders)):
        before = len(done)
        for stage, order in enumerate(orders):
            for each in order[len(spans[stage]) :]:
                needed = _input_of(schedule, stage, each)
                if needed is not None and needed not in done:
                    break
                free = spans[stage][-1].end if spans[stage] else 0.0
                begin = max(free, 0.0 if needed is None else done[needed])
                end = begin + seconds[stage][each.chunk][each.backward]
                done[stage, each] = end
                name = BACKWARD if each.backward else FORWARD
                spans[stage].append(TimeSpan(name, begin, end, each.microbatch, each.chunk))
        assert len(done) > before, "the schedule waits for itself"
    return spans


def _input_of(schedule: Schedule, stage: int, each: Pass) -> tuple[int, Pass] | None:
    """The stage and pass whose result a pass starts from."""
    step = -1 if each.backward else 1
    if each.backward and (stage, each.chunk) == (schedule.pp - 1, schedule.vpp - 1):
        return stage, each._replace(backward=False)
    if not each.backward and (stage, each.chunk) == (0, 0):
        return None
    place = each.chunk * schedule.pp + stage - step
    chunk, owner = divmod(place, schedule.pp)
    return owner, each._replace(chunk=chunk)


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The timeline in Chrome's Trace Event Format, as JSON data: a process for each rank, whose
    times are microseconds from the first span.
    """
    begins = [span.begin for track in timeline.tracks for span in track.spans]
    first = min(begins, default=0.0)
    events: list[dict[str, Any]] = []
    for track in timeline.tracks:
        name = f"stage {track.stage}" if timeline.expected else f"rank {track.rank}"
        if not timeline.expected and len({each.stage for each in timeline.tracks}) > 1:
            name += f", stage {track.stage}"
        named = {"ph": "M", "pid": track.rank, "tid": 0}
        events += (
            named | {"name": "process_name", "args": {"name": name}},
            named | {"name": "process_sort_index", "args": {"sort_index": track.rank}},
            named | {"name": "thread_name", "args": {"name": "passes"}},
        )
        events += (_event(track.rank, span, first, timeline.chunks) for span in track.spans)
    source = "expected" if timeline.expected else "recorded"
    other = {"source": source, "chunks": timeline.chunks}
    stages = {str(track.rank): track.stage for track in timeline.tracks}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": other | {"stages": stages},
    }


def _event(rank: int, span: TimeSpan, first: float, chunks: int) -> dict[str, Any]:
    name, args = span.name, {}
    if span.microbatch is not None:
        name += f" {span.microbatch}"
        args["microbatch"] = span.microbatch
        if chunks > 1:
            name += f", chunk {span.chunk}"
            args["chunk"] = span.chunk
    times = {"ts": (span.begin - first) * 1e6, "dur": span.seconds * 1e6}
    kind = {"name": name, "cat": span.name, "ph": "X"}
    return kind | times | {"pid": rank, "tid": 0, "args": args}


def read_trace(data: Mapping[str, Any]) -> Timeline:
    """The inverse of `trace_events`; times are from the first span."""
    other = data["otherData"]
    spans: dict[int, list[TimeSpan]] = {int(rank): [] for rank in other["stages"]}
    for event in data["traceEvents"]:
        if event["ph"] != "X":
            continue
        begin, args = event["ts"] / 1e6, event["args"]
        end = begin + event["dur"] / 1e6
        where = args.get("microbatch"), args.get("chunk", 0)
        spans[event["pid"]].append(TimeSpan(event["cat"], begin, end, *where))
    tracks = (
        Track(rank, other["stages"][str(rank)], tuple(found)) for rank, found in spans.items()
    )
    return Timeline(tuple(tracks), other["chunks"], other["source"] == "expected")


def phases(tracks: Iterable[Track]) -> dict[str, float]:
    """Seconds of each kind of span, on the rank where it takes longest."""
    found: dict[str, float] = {}
    for track in tracks:
        own: dict[str, float] = {}
        for span in track.spans:
            own[span.name] = own.get(span.name, 0.0) + span.seconds
        found = {name: max(found.get(name, 0.0), own.get(name, 0.0)) for name in found | own}
    return found
