"""Pictures of layouts and steps: what is expected of a step, what is drawn, and what is refused."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.device.timing import BACKWARD, FORWARD
from megatron_policy.estimate.devices import SHORT
from megatron_policy.estimate.plan import StepPlan, plan_of
from megatron_policy.estimate.schedule import Schedule
from megatron_policy.estimate.states import ModelRows
from megatron_policy.estimate.timeline import _simulated, expected_timeline, read_trace
from megatron_policy.pictures.canvas import MARGIN, WIDTH
from megatron_policy.pictures.layout import LayoutView, draw_layout
from megatron_policy.pictures.timeline import draw_plan
from tests.families import PUBLISHED

LLAMA = PUBLISHED["Llama-3.1-8B"][1]
FIELDS = {"dense": LLAMA | {"num_hidden_layers": 64}, "moe": PUBLISHED["Qwen3-30B-A3B"][1]}
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1 rank": ("dense", 1, {}),
    "8 replicas": ("dense", 8, {}),
    "interleaved": ("dense", 8, {PP: 4, "virtual_pipeline_model_parallel_size": 2}),
    "1,024 ranks": ("dense", 1024, {TP: 8, "context_parallel_size": 4, PP: 8}),
    "64 stages": ("dense", 64, {PP: 64}),
    "experts": ("moe", 256, {"expert_model_parallel_size": 64, "expert_tensor_parallel_size": 1}),
}


@cache
def rows_of(name: str) -> ModelRows:
    return ModelRows.of(bind(read_config(model_in(name))))


@cache
def model_in(name: str) -> Path:
    path = Path(mkdtemp())
    (path / "config.json").write_text(json.dumps(FIELDS[name]))
    return path


def planned(name: str, rows: int = 256) -> StepPlan:
    """The plan of a layout, with so many rows in a global batch."""
    model, ranks, keys = LAYOUTS[name]
    section = {
        "model_name": model,
        "precision": "bfloat16",
        "train_global_batch_size": rows,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": 4096,
        "megatron_cfg": {"enabled": True, "sequence_parallel": keys.get(TP, 1) > 1, **keys},
    }
    return plan_of(PolicyConfig.parse(section), rows_of(model), ranks, SHORT["H100"])


def test_a_stage_runs_every_pass_once_and_none_backward_before_it_ran_forward() -> None:
    for pp, vpp, microbatches in ((4, 1, 6), (4, 1, 2), (4, 2, 8), (2, 4, 4)):
        schedule = Schedule(pp, vpp, microbatches)
        for stage in range(pp):
            order = schedule.order(stage)
            assert len(set(order)) == len(order) == 2 * vpp * microbatches
            for place, each in enumerate(order):
                assert not each.backward or each._replace(backward=False) in order[:place]


def test_a_step_of_equal_stages_takes_as_long_as_the_formula_says() -> None:
    for pp, vpp in ((1, 1), (4, 1), (4, 2), (2, 4)):
        schedule, seconds = Schedule(pp, vpp, 8), [[(1.0, 2.0)] * vpp] * pp
        spans = _simulated(schedule, seconds)
        end = max(span.end for stage in spans for span in stage)
        # The formula's bubble is the least; Megatron-Core's interleaved order has it too.
        assert end == pytest.approx(schedule.seconds([3.0 * vpp] * pp))


def test_a_stage_waits_for_the_pass_that_makes_its_input() -> None:
    timeline = expected_timeline(planned("interleaved"), 8)
    place = {
        (track.stage, span.name, span.chunk, span.microbatch): span
        for track in timeline.tracks
        for span in track.passes
    }
    chunks, stages = timeline.chunks, len(timeline.tracks)
    for (stage, name, chunk, number), span in place.items():
        step = 1 if name == FORWARD else -1
        before, owner = divmod(chunk * stages + stage - step, stages)
        if 0 <= before < chunks:
            assert place[owner, name, before, number].end <= span.begin
    last = place[stages - 1, BACKWARD, chunks - 1, 0]
    assert place[stages - 1, FORWARD, chunks - 1, 0].end == last.begin


def texts_in(path: Path) -> Iterator[tuple[float, float, float, str]]:
    """(left, right, middle of the height, text) of what is written in an SVG, in pixels, from
    widths of characters in DejaVu Sans.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    root = ET.parse(path).getroot()
    unit = WIDTH / float(root.attrib["width"].removesuffix("pt"))
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        style = dict(each.strip().split(": ", 1) for each in element.attrib["style"].split(";"))
        size = float(style["font-size"].removesuffix("px")) * unit
        bold = style.get("font-weight", "400") == "700"
        font = FontProperties(weight=700 if bold else 400)
        width = TextPath((0, 0), element.text, size, prop=font).get_extents().width
        moved = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", element.attrib.get("transform", ""))
        place = moved.groups() if moved else (element.attrib["x"], element.attrib["y"])
        x, y = (float(number) * unit for number in place)
        anchor = style.get("text-anchor", "start")
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        assert size >= 9, f"{element.text!r} is {size} pixels high"
        yield left, left + width, y, element.text or ""


@pytest.mark.dear
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_text_is_small_leaves_the_sheet_or_covers_another(tmp_path: Path, name: str) -> None:
    plan = planned(name, 64 if name == "64 stages" else 256)
    layout, step = tmp_path / "layout.svg", tmp_path / "step.svg"
    draw_layout(LayoutView.of_plan(plan, "H100 of 80 GiB"), layout)
    draw_plan(plan, step)

    for path in (layout, step):
        found = sorted(texts_in(path), key=lambda text: (round(text[2]), text[0]))
        assert len(found) > 8
        for left, right, _, text in found:
            assert left >= MARGIN - 2 and right <= WIDTH - MARGIN + 2, text
        for one, other in pairwise(found):
            same_line = abs(one[2] - other[2]) < 6
            assert not same_line or one[1] <= other[0] + 1, (one, other)


def test_a_picture_of_1024_ranks_shows_every_stage_and_counts_the_replicas(tmp_path: Path) -> None:
    draw_layout(LayoutView.of_plan(planned("1,024 ranks"), "H100 of 80 GiB"), tmp_path / "l.svg")
    found = [text for *_, text in texts_in(tmp_path / "l.svg")]
    assert {f"stage {stage}" for stage in range(8)} <= set(found)
    assert "ranks 896-1023" in found and "x 3 more replicas" in found
    assert "rank 31" in found and "rank 32" not in found


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_plan_draws_the_layout_the_step_and_what_a_refit_sends_and_says_where(
    tmp_path: Path,
) -> None:
    options = ("--model", model_in("dense"), "--tp", 2, "--pp", 2, "--dp", 1, "--rows", 8)
    picture, timeline, trace = (tmp_path / name for name in ("l.png", "t.png", "t.json"))
    result = run(*options, "--picture", picture, "--timeline", timeline)
    assert f"the layout: {picture}\nthe expected step: {timeline}\n" in result.stdout
    for path in (picture, timeline):
        with Image.open(path) as image:
            assert image.width == 2 * WIDTH and path.stat().st_size < 100_000
    result = run(*options, "--json", "--timeline", trace)
    assert len(json.loads(result.stdout)) == 1 and str(trace) in result.stderr
    written = read_trace(json.loads(trace.read_text()))
    assert written.expected and written.microbatches == 8
    assert [track.stage for track in written.tracks] == [0, 1]
    path = tmp_path / "refit.svg"
    result = run("--refit", model_in("dense"), "--tp", 2, "--pp", 2, "--picture", path)
    assert result.exit_code == 0 and result.stdout.endswith(f"the layout: {path}\n")
    found = [text for *_, text in texts_in(path)]
    assert "GB of whole tensors from each stage" in found
    assert sum(float(text) for text in found if text.count(".") == 1 and text[0].isdigit()) > 0


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--picture", "l.jpg", "does not end in .svg or .png: give a file that does"),
        ("--timeline", "t.txt", "ends in none of .svg, .png and .json"),
        ("--timeline", "missing/t.json", "make it first"),
        ("--picture", "l.svg", 'pip install "matplotlib>=3.8"'),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused_before_anything_is_planned(
    tmp_path: Path, option: str, file: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "pip" in message:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--model", tmp_path / "none", "--gpus", 8, option, tmp_path / file)
    assert result.exit_code == 2 and message in result.stderr
