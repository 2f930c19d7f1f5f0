"""`plan --picture` and `plan --timeline`: a layout and the step expected under it, drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_policy.cli.output import say

if TYPE_CHECKING:
    from megatron_policy.cli.plan_refit import PlannedRefit
    from megatron_policy.estimate.plan import StepPlan
    from megatron_policy.pictures.layout import LayoutView

PictureFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Draw what each rank holds, as .svg or .png, of the first plan."
    ),
]
TimelineFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw its step, as .svg or .png, or write it as a Chrome trace, a .json.",
    ),
]

_TRACE = ".json"


def check_files(picture: Path | None, timeline: Path | None) -> None:
    """ConfigError for a file that cannot be written, before anything is computed."""
    from megatron_policy.errors import ConfigError
    from megatron_policy.pictures.canvas import SUFFIXES, check_picture

    if picture is not None:
        check_picture(picture, "--picture")
    if timeline is not None and timeline.suffix.lower() != _TRACE:
        if timeline.suffix.lower() not in SUFFIXES:
            raise ConfigError(
                f"--timeline {timeline} ends in none of {', '.join(SUFFIXES)} and {_TRACE}: give "
                "a file that does"
            )
        check_picture(timeline, "--timeline")
    for option, path in (("--picture", picture), ("--timeline", timeline)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")


def draw_step(
    plan: StepPlan, device: str, picture: Path | None, timeline: Path | None, as_json: bool
) -> None:
    """Write the files that are asked for, and say so, on stderr beside JSON."""
    from megatron_policy.pictures.layout import LayoutView

    if picture is not None:
        _draw(LayoutView.of_plan(plan, device), picture, as_json)
    if timeline is None:
        return
    if timeline.suffix.lower() == _TRACE:
        from megatron_policy.estimate.timeline import expected_timeline, trace_events

        timeline.write_text(json.dumps(trace_events(expected_timeline(plan))) + "\n")
    else:
        from megatron_policy.pictures.timeline import draw_plan

        draw_plan(plan, timeline)
    say(f"the expected step: {timeline}", err=as_json)


def draw_refit(planned: PlannedRefit, picture: Path | None, as_json: bool) -> None:
    """Write the picture of a refit, if it is asked for: what the ranks of each stage send."""
    if picture is None:
        return
    from megatron_policy.pictures.layout import LayoutView

    sent = [0] * planned.topology.pp
    for tensor in planned.plan.tensors:
        sent[tensor.stage] += tensor.nbytes
    arch = planned.table.architecture
    view = LayoutView.of_refit(arch, planned.topology, planned.split, sent)
    _draw(view, picture, as_json)


def _draw(view: LayoutView, picture: Path, as_json: bool) -> None:
    from megatron_policy.pictures.layout import draw_layout

    draw_layout(view, picture)
    say(f"the layout: {picture}", err=as_json)
