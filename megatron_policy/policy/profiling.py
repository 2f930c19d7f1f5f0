"""Profiles what a policy does: a trace of each rank, a timeline of all ranks, and a summary."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_policy.coordination.agreement import gather_lists
from megatron_policy.device.profiling import OperationProfiler, OperationTime
from megatron_policy.device.timing import BACKWARD, FORWARD, SCORING, TRAINING
from megatron_policy.errors import ConfigError
from megatron_policy.estimate.schedule import Schedule
from megatron_policy.estimate.timeline import Timeline, Track, phases, trace_events
from megatron_policy.interfaces.engine import REDUCE, TrainingEngine
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.speed import STEP

_log = logging.getLogger(__name__)

TIMELINE, PICTURE, SUMMARY, TEXT = "timeline.json", "timeline.svg", "summary.json", "summary.txt"
_PARTS = (TRAINING, SCORING, FORWARD, BACKWARD, REDUCE, STEP)
_SLOWEST = 15
_SENT = 200
"""Operations of each rank of which the slowest are found."""


@dataclass
class Profile:
    """What a profile has found, the same on every rank: nothing before its context is left. `files`
    are those of rank 0 and each rank's trace. As text it is a summary.
    """

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None
    files: tuple[Path, ...] = ()

    @classmethod
    def at(cls, folder: str | os.PathLike[str]) -> Profile:
        """One that is to be written to `folder`."""
        return cls(Path(folder).expanduser().resolve())

    def take(self, found: Profile) -> None:
        """Become what has been found."""
        self.summary, self.timeline, self.files = found.summary, found.timeline, found.files

    def __str__(self) -> str:
        if not self.summary:
            return f"a profile, to be written to {self.folder}"
        return "\n".join([*_lines(self.summary), *map(str, self.files)])


@contextmanager
def profiling(
    engine: TrainingEngine, topology: Topology, folder: str | os.PathLike[str], operations: bool
) -> Iterator[Profile]:
    """In this context, record what the policy does, and at its end write it to `folder`, on request
    with the `operations` of each rank; collective.
    """
    if engine.recorder.on:
        raise ConfigError("profile(): a profile is open already; leave its context first")
    found = Profile.at(folder)
    found.folder.mkdir(parents=True, exist_ok=True)
    profiler = OperationProfiler() if operations else None
    rank = dist.get_rank()
    engine.recorder.start()
    try:
        if profiler is not None:
            profiler.start()
        yield found
    finally:
        if profiler is not None:
            profiler.stop()
        spans = engine.recorder.stop()
    # Not after an error, which other ranks need not have.
    own: list[OperationTime] = []
    if profiler is not None:
        profiler.write(found.folder / _trace_name(rank))
        own = profiler.operations(without=_PARTS)[:_SENT]
    stage = topology.coords(rank).pp
    world = dist.group.WORLD
    assert world is not None
    ranks = gather_lists([(Track(rank, stage, spans), own)], world)
    found.timeline = Timeline(tuple(track for track, _ in ranks), topology.vpp, expected=False)
    found.summary = _summarize(found.timeline, topology, [each for _, each in ranks])
    from megatron_policy.pictures.canvas import can_draw

    names = [SUMMARY, TEXT, TIMELINE, *([PICTURE] if can_draw() else [])]
    names += map(_trace_name, range(len(ranks) if operations else 0))
    found.files = tuple(found.folder / name for name in names)
    if rank == 0:
        _write(found)
        _log.info("profile written: %s", ", ".join(map(str, found.files)))


def _trace_name(rank: int) -> str:
    return f"rank_{rank}.json.gz"


def _write(found: Profile) -> None:
    """What rank 0 writes."""
    assert found.timeline is not None
    folder, events = found.folder, trace_events(found.timeline)
    (folder / TIMELINE).write_text(json.dumps(events) + "\n")
    (folder / SUMMARY).write_text(json.dumps(found.summary, indent=2) + "\n")
    (folder / TEXT).write_text("\n".join(_lines(found.summary)) + "\n")
    if folder / PICTURE in found.files:
        from megatron_policy.pictures.timeline import draw_timeline

        note = f"{found.timeline.last_step().microbatches} microbatches, the first rank of a stage"
        draw_timeline(found.timeline, folder / PICTURE, "Recorded: the last step", note)
    else:
        _log.info("no %s: the extra `pictures`, which has matplotlib, is not installed", PICTURE)


def _summarize(
    timeline: Timeline, topology: Topology, operations: Sequence[Sequence[OperationTime]]
) -> dict[str, Any]:
    """The profile as JSON: seconds and counts."""
    step = timeline.last_step()
    axes = ("tp", "cp", "ep", "dp", "pp", "vpp")
    schedule = Schedule.of(topology, step.microbatches)
    total: dict[str, OperationTime] = {}
    for each in (one for of_rank in operations for one in of_rank):
        before = total.get(each.name, OperationTime(each.name, 0, 0.0))
        summed = before.calls + each.calls, before.seconds + each.seconds
        total[each.name] = OperationTime(each.name, *summed)
    slowest = sorted(total.values(), key=lambda each: -each.seconds)[:_SLOWEST]
    return {
        "ranks": topology.world_size,
        "layout": {axis: getattr(topology, axis) for axis in axes},
        "steps": sum(span.name == STEP for span in timeline.tracks[0].spans),
        "seconds": phases(timeline.tracks),
        "last_step": {
            "microbatches": step.microbatches,
            "seconds": phases(step.tracks),
            "waiting": {str(stage): share for stage, share in step.waiting().items()},
            "bubble_of_equal_stages": schedule.bubble if step.microbatches else 0.0,
        },
        "slowest_operations": [asdict(each) for each in slowest],
    }


def _lines(summary: Mapping[str, Any]) -> Iterator[str]:
    layout = " x ".join(f"{axis} {size}" for axis, size in summary["layout"].items() if size > 1)
    steps, ranks = (
        f"{number} {what}{'s' * (number != 1)}"
        for number, what in ((summary["steps"], "step"), (summary["ranks"], "rank"))
    )
    yield f"{steps} on {ranks}" + (f": {layout}" if layout else "")
    last = summary["last_step"]
    yield "seconds, on the rank where each takes longest: of all, of the last step"
    for name, seconds in summary["seconds"].items():
        own = last["seconds"].get(name, 0.0)
        indent = "  " if name in (FORWARD, BACKWARD, REDUCE) else ""
        yield f"  {indent + name:<18} {seconds:10.4f} {own:10.4f}"
    waiting = ", ".join(f"stage {stage} {share:.0%}" for stage, share in last["waiting"].items())
    yield f"the last step had {last['microbatches']} microbatches; waiting between its passes:"
    yield f"  {waiting}; a bubble of {last['bubble_of_equal_stages']:.0%} if stages were equal"
    if summary["slowest_operations"]:
        yield "slowest operations, over all ranks: seconds, calls"
    for each in summary["slowest_operations"]:
        yield f"  {each['seconds']:10.4f} {each['calls']:8d}  {each['name'][:60]}"
