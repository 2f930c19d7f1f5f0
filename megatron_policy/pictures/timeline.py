"""Draws the passes of a step over microbatches: a row for each stage, a lane for each chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from megatron_policy.device.timing import BACKWARD, FORWARD, TimeSpan
from megatron_policy.estimate.plan import StepPlan
from megatron_policy.estimate.timeline import PASSES, Timeline, Track, expected_timeline
from megatron_policy.pictures.canvas import (
    FAINT,
    INK,
    LARGE,
    MARGIN,
    NORMAL,
    PAPER,
    RULE,
    SMALL,
    WIDTH,
    Canvas,
    number_fits,
)

_LEFT, _RIGHT = 124, WIDTH - 72
_TOP, _LANE, _GAP, _AXIS = 84, 19, 7, 44
MOST_LANES = 32
"""Lanes that are drawn; if there are more, those of the first stages and of the last."""

_FEW = 8
"""Microbatches that are drawn at least, if there are so many."""

_FILLS = {FORWARD: "#bcdcf2", BACKWARD: "#9c4a08"}
_INKS = {FORWARD: INK, BACKWARD: PAPER}
_OTHERS = {"reduce": ("#ffffff", "////"), "step": ("#d9d9d9", "xxxx")}
"""What follows the passes: fill and hatch of each part."""


def draw_plan(plan: StepPlan, path: Path) -> None:
    """Write a picture of the step that a plan expects. Of many microbatches a few are drawn, which
    is enough to see how the schedule begins, goes on and ends.
    """
    at, number = plan.topology, plan.schedule.microbatches
    few = max(_FEW, at.pp + 4) if at.vpp == 1 else at.pp * max(2, -(-_FEW // at.pp))
    whole = expected_timeline(plan)
    shown = whole if number <= few else expected_timeline(plan, few)
    note = f"every pass in its least time; {number} microbatches on each replica"
    if shown is not whole:
        note += f", drawn with {few}: the middle repeats"
    draw_timeline(shown, path, "Expected: a training step", note, whole.waiting())


def draw_timeline(
    timeline: Timeline,
    path: Path,
    heading: str,
    note: str,
    waiting: Mapping[int, float] | None = None,
) -> None:
    """Write a picture of the timeline's last step to `path`, an .svg or .png; `heading` says of
    what, `note` what else to say, `waiting` how long each stage waits, if not as drawn. Of the
    ranks of a stage the first is drawn.
    """
    step = timeline.last_step()
    rows = _rows(step)
    row_height = _LANE * step.chunks + _GAP
    bottom = _TOP + len(rows) * row_height
    canvas = Canvas(bottom + _AXIS)
    canvas.text(MARGIN, 20, heading, LARGE, bold=True)
    canvas.text(MARGIN, 41, note, NORMAL, color=FAINT)
    drawn = [row for row in rows if isinstance(row, Track)]
    scale = _Scale.of(drawn)
    x, y = float(_LEFT), _TOP - 19
    names = {span.name for track in drawn for span in track.spans}
    for name, text, fill, hatch in (
        (FORWARD, "forward pass of a microbatch", _FILLS[FORWARD], ""),
        (BACKWARD, "backward pass", _FILLS[BACKWARD], ""),
        ("reduce", "gradients reduced", *_OTHERS["reduce"]),
        ("step", "optimizer's step", *_OTHERS["step"]),
    ):
        if name in names:
            canvas.box(x, y, 20, 13, fill=fill, hatch=hatch)
            x = canvas.text(x + 25, y + 7, text, NORMAL) + 18
    canvas.text(WIDTH - MARGIN, _TOP - 12, "waits", NORMAL, align="right", color=FAINT)
    shares = step.waiting() if waiting is None else waiting
    for number, row in enumerate(rows):
        top = _TOP + number * row_height
        middle = top + (row_height - _GAP) / 2
        if not isinstance(row, Track):
            canvas.text((_LEFT + _RIGHT) / 2, middle, f"{row} more stages", align="center")
            continue
        _draw_row(canvas, row, scale, top, step)
        canvas.text(WIDTH - MARGIN, middle, f"{shares[row.stage]:.0%}", NORMAL, align="right")
    _draw_axis(canvas, scale, bottom)
    canvas.save(path)


def _rows(timeline: Timeline) -> list[Track | int]:
    """The first track of each stage; a number in place of so many stages that are left out."""
    first: dict[int, Track] = {}
    for track in timeline.tracks:
        first.setdefault(track.stage, track)
    tracks = [first[stage] for stage in sorted(first)]
    half = max(1, MOST_LANES // timeline.chunks // 2)
    if len(tracks) <= 2 * half:
        return list(tracks)
    return [*tracks[:half], len(tracks) - 2 * half, *tracks[-half:]]


@dataclass(frozen=True)
class _Scale:
    """Where a time is on the sheet."""

    begin: float
    seconds: float

    @classmethod
    def of(cls, tracks: Sequence[Track]) -> _Scale:
        spans = [span for track in tracks for span in _select_spans(track)]
        begin = min((span.begin for span in spans), default=0.0)
        end = max((span.end for span in spans), default=begin)
        return cls(begin, max(end - begin, 1e-9))

    def x(self, time: float) -> float:
        """Pixels from the left edge of the sheet."""
        return _LEFT + (time - self.begin) / self.seconds * (_RIGHT - _LEFT)


def _select_spans(track: Track) -> list[TimeSpan]:
    return [span for span in track.spans if span.name in PASSES or span.name in _OTHERS]


def _draw_row(canvas: Canvas, track: Track, scale: _Scale, top: float, step: Timeline) -> None:
    """The lanes of one stage."""
    height = _LANE * step.chunks
    canvas.box(_LEFT, top, _RIGHT - _LEFT, height, fill="#f2f2f2", edge="#f2f2f2")
    middle = top + height / 2
    name = f"stage {track.stage}"
    two_lines = not step.expected and step.chunks > 1
    right = canvas.text(MARGIN, middle - 7 * two_lines, name, NORMAL, bold=True)
    if not step.expected:
        x, y = (MARGIN, middle + 7) if two_lines else (right + 6, middle)
        canvas.text(x, y, f"rank {track.rank}", SMALL, color=FAINT)
    for chunk in range(step.chunks if step.chunks > 1 else 0):
        y = top + (chunk + 0.5) * _LANE
        canvas.text(_LEFT - 5, y, f"chunk {chunk}", SMALL, align="right", color=FAINT)
    for span in _select_spans(track):
        x, width = scale.x(span.begin), scale.x(span.end) - scale.x(span.begin)
        if span.name in _OTHERS:
            fill, hatch = _OTHERS[span.name]
            canvas.box(x, top, width, height, fill=fill, edge=FAINT, hatch=hatch)
            continue
        lane = top + span.chunk * _LANE
        canvas.box(x, lane + 1, width, _LANE - 2, fill=_FILLS[span.name])
        number = span.microbatch
        if number is not None and number_fits(number, width):
            place = x + width / 2, lane + _LANE / 2 + 0.5
            canvas.text(*place, str(number), SMALL, align="center", color=_INKS[span.name])


def _draw_axis(canvas: Canvas, scale: _Scale, y: float) -> None:
    """Times from the first span, in a unit that gives numbers of few digits."""
    factor, unit = (1.0, "s") if scale.seconds >= 2 else (1e3, "ms")
    if scale.seconds < 2e-3:
        factor, unit = 1e6, "us"
    whole = scale.seconds * factor
    # 1, 2 or 5 times a power of ten.
    steps = (digit * 10.0**power for power in count(-9) for digit in (1, 2, 5))
    step = next(step for step in steps if step >= whole / 8)
    canvas.line(_LEFT, y, _RIGHT, y)
    for number in range(int(whole / step) + 1):
        x = scale.x(scale.begin + number * step / factor)
        canvas.line(x, y, x, y + 4, RULE)
        canvas.text(x, y + 13, f"{number * step:g}", SMALL, align="center", color=FAINT)
    canvas.text(_RIGHT + 8, y + 13, unit, NORMAL, color=FAINT)
    note = "waits: the share of the time between the first pass and the last with no pass"
    canvas.text(_LEFT, y + 31, note, SMALL, color=FAINT)
