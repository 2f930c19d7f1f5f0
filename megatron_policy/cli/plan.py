"""`plan`: what a training step needs on each rank and how fast it can be, or which layouts fit;
with pictures of a layout and of the step expected under it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_policy.cli import plan_options as options
from megatron_policy.cli.options import (
    AsJson,
    Dtype,
    Overrides,
    PolicyFileOrNone,
    Precision,
    keys_as_options,
)
from megatron_policy.cli.output import say
from megatron_policy.cli.report import one_line_errors, show
from megatron_policy.estimate.sizes import show_gib

if TYPE_CHECKING:
    from megatron_policy.cli.plan_refit import PlannedRefit
    from megatron_policy.estimate.devices import DeviceFigures
    from megatron_policy.estimate.plan import SearchResult, StepPlan
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
_SIZES = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "first_layers", "last_layers")


def plan(
    config: PolicyFileOrNone = None,
    overrides: Overrides = None,
    model: options.Model = None,
    refit: options.Refit = None,
    gpus: options.Gpus = None,
    gpu: options.Gpu = None,
    gpu_memory: options.GpuMemory = None,
    beside_engine: options.Engine = None,
    seq_len: options.SeqLen = None,
    patches: options.Patches = None,
    frames: options.Frames = None,
    rows: options.Rows = None,
    mb_tokens: options.MbTokens = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    vpp: options.Vpp = None,
    dp: options.Dp = None,
    cp: options.Cp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    first_layers: options.FirstLayers = None,
    last_layers: options.LastLayers = None,
    recompute: options.Recompute = None,
    as_json: AsJson = False,
    bucket_size: options.BucketSize = None,
    dtype: options.SentDtype = None,
    precision: options.TrainedDtype = None,
    tensors: options.Tensors = False,
    engine_layout: options.EngineLayout = None,
    machine: options.Machine = None,
    shared_nodes: options.SharedNodes = False,
    delta: options.Delta = None,
    picture: PictureFile = None,
    timeline: TimelineFile = None,
) -> None:
    """Show what a training step needs on each rank, and the least time it can take.

    Give a CONFIG, or a --model and --gpus; without a layout (--tp and so on) the legal ones are
    searched, and the best that fit are listed. Pictures are of the first. Reads no weights.
    """
    with one_line_errors(as_json):
        options.refuse_unread(options.given_options(locals()))
        layout = {name: size for name, size in locals().items() if name in _SIZES}
        trained = precision or Precision.bfloat16
        check_files(picture, timeline)
        if refit is not None:
            said = (bucket_size, dtype, trained, engine_layout, delta, tensors, as_json)
            return _show_refit(refit, layout, gpus, *said, (machine, gpu, shared_nodes), picture)
        from megatron_policy.cli import plan_inputs as inputs

        of_rows = (seq_len, inputs.RowMedia(patches or 0, frames or 0))
        device = inputs.device_of(gpu or "H100", gpu_memory, beside_engine)
        if config is not None:
            base, found = inputs.plan_file(config, overrides, gpus, device, of_rows, as_json)
        else:
            base = inputs.make_section(model, rows or 512, seq_len, mb_tokens, trained)
            found = inputs.plan_model(base, layout, gpus, device, of_rows, recompute)
    _show_step(found, gpu or "H100", device, None if config else base, as_json, picture, timeline)
    _advise(found, base, config is not None, device, seq_len, as_json)


def _show_refit(
    source: str,
    layout: dict[str, int | None],
    gpus: int | None,
    bucket_bytes: int | None,
    dtype: Dtype | None,
    precision: Precision,
    engine_layout: str | None,
    changed: float | None,
    tensors: bool,
    as_json: bool,
    links: tuple[str | None, str | None, bool],
    picture: Path | None,
) -> None:
    from megatron_policy.cli.plan_inputs import complete_sizes, count_ranks, device_of
    from megatron_policy.cli.plan_links import parse_machine
    from megatron_policy.cli.plan_refit import refit_of, report_refit

    with keys_as_options(uneven=True):
        sizes = complete_sizes(layout)
        ranks = count_ranks(sizes, layout["dp"], gpus)
        figures, gpu, shared = links
        device = None if gpu is None else device_of(gpu, None, None)
        to = (engine_layout, parse_machine(figures, device, shared), changed)
        planned = refit_of(source, sizes, ranks, bucket_bytes, dtype, precision, *to)
        show(report_refit(planned, tensors), as_json)
        draw_refit(planned, picture, as_json)


def _show_step(
    found: StepPlan | SearchResult,
    gpu: str,
    device: DeviceFigures,
    base: Mapping[str, Any] | None,
    as_json: bool,
    picture: Path | None,
    timeline: Path | None,
) -> None:
    from megatron_policy.cli.plan_report import plans_of, report_plans

    name = f"{gpu.upper()} of {show_gib(device.memory_bytes)}"
    show(report_plans(found, name, base), as_json)
    if plans := plans_of(found):
        with one_line_errors(as_json):
            draw_step(plans[0], name, picture, timeline, as_json)


def _advise(
    found: StepPlan | SearchResult,
    base: Mapping[str, Any],
    of_config: bool,
    device: DeviceFigures,
    length: int | None,
    as_json: bool,
) -> None:
    """Say what would fit, if nothing does, and end the command."""
    from megatron_policy.cli.plan_advice import advise

    advice = list(advise(found, base, of_config, device, length))
    for line in advice:
        say(line, err=as_json)
    if advice:
        raise typer.Exit(1)


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
