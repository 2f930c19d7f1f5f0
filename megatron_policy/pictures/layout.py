"""Draws a layout: what each stage holds and needs, and how its ranks share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megatron_policy.converters.architecture import Architecture
from megatron_policy.estimate.plan import StepPlan
from megatron_policy.parallel.topology import Coords, LayerSplit, Topology, ranges
from megatron_policy.pictures.canvas import (
    FAINT,
    INK,
    LARGE,
    MARGIN,
    NORMAL,
    PAPER,
    SMALL,
    WIDTH,
    Canvas,
)

MOST_STAGES = 12
"""Rows of stages that are drawn; of more, the first and the last, and one for those between."""

_ROW, _BAR_LEFT, _BAR_RIGHT = 40, 292, WIDTH - 64
_HEAD = 60


@dataclass(frozen=True)
class BarPart:
    """Bytes of one kind, and how they are drawn."""

    name: str
    size: int
    fill: str
    hatch: str = ""
    ink: str = INK


Bar = tuple[BarPart, ...]
"""What one stage has: its bytes on each rank by kind."""


def _size_of(bar: Bar) -> int:
    return sum(part.size for part in bar)


@dataclass(frozen=True)
class LayoutView:
    """What a picture of a layout shows. `bars` are bytes of each stage, as `about` says; none may
    exceed the `limit`, if there is one. A layer has so many `experts`, or none.
    """

    heading: str
    topology: Topology
    split: LayerSplit
    experts: int | None
    shards_optimizer: bool
    about: str
    bars: tuple[Bar, ...]
    limit: int | None = None
    unit: int = 2**30
    """Bytes of what numbers of bars count."""

    @classmethod
    def of_plan(cls, plan: StepPlan, device: str) -> LayoutView:
        """A plan's layout, with the memory of each stage's ranks; `device` names the GPUs."""
        arch = plan.architecture
        return cls(
            f"{arch.num_layers} layers of width {arch.hidden_size} on "
            f"{plan.topology.world_size} {device}",
            plan.topology,
            plan.split,
            None if arch.moe is None else arch.moe.experts,
            plan.config.megatron_cfg.optimizer.use_distributed_optimizer,
            "GiB on each rank at the step's peak",
            tuple(_memory_bar(plan, stage) for stage in range(plan.topology.pp)),
            plan.usable,
        )

    @classmethod
    def of_refit(
        cls, arch: Architecture, topology: Topology, split: LayerSplit, sent: Sequence[int]
    ) -> LayoutView:
        """A layout whose weights are handed over: the bytes that each stage sends."""
        unit, name = (10**9, "GB") if max(sent) >= 10**9 else (10**6, "MB")
        return cls(
            f"A refit of {arch.num_layers} layers from {topology.world_size} ranks",
            topology,
            split,
            None if arch.moe is None else arch.moe.experts,
            False,
            f"{name} of whole tensors from each stage",
            tuple((BarPart("sent", size, "#c6dcef"),) for size in sent),
            unit=unit,
        )


def _memory_bar(plan: StepPlan, stage: int) -> Bar:
    found = plan.stages[stage]
    states = found.states
    passes = found.activations + found.head
    return (
        BarPart("parameters", states.parameters, "#1f4e79", ink=PAPER),
        BarPart("gradients", states.gradients, "#c6dcef"),
        BarPart("optimizer", states.main_parameters + states.moments, "#ffffff", "////"),
        BarPart("activations and head", passes, "#d8742a")
        if passes >= states.step
        else BarPart("step", states.step, "#d8742a", "xxxx"),
    )


def draw_layout(view: LayoutView, path: Path) -> None:
    """Write a picture of the layout to `path`, an .svg or .png."""
    groups = _group_stages(view)
    ranks = _Ranks.of(view)
    stages_height = 56 + _ROW * len(groups)
    canvas = Canvas(_HEAD + stages_height + 40 + ranks.height)
    canvas.text(MARGIN, 20, view.heading, LARGE, bold=True)
    at = view.topology
    sizes = " x ".join(f"{axis} {getattr(at, axis)}" for axis in ("tp", "cp", "dp", "pp"))
    sizes += f", {at.vpp} chunks a stage" if at.vpp > 1 else ""
    sizes += "" if view.experts is None else f", experts ep {at.ep} x etp {at.expert_tp}"
    canvas.text(MARGIN, 42, sizes, NORMAL, color=FAINT)
    x = float(_BAR_LEFT)
    names = {part.name: part for bar in view.bars for part in bar if part.size}
    for part in names.values():
        canvas.box(x, _HEAD, 20, 13, fill=part.fill, hatch=part.hatch)
        x = canvas.text(x + 25, _HEAD + 7, part.name, NORMAL) + 10
    canvas.text(MARGIN, _HEAD + 28, "stages", NORMAL, bold=True)
    canvas.text(_BAR_LEFT, _HEAD + 28, view.about, NORMAL, bold=True)
    scale = (_BAR_RIGHT - _BAR_LEFT) / max(*map(_size_of, view.bars), view.limit or 0)
    top = _HEAD + 40
    for number, stages in enumerate(groups):
        _draw_stage(canvas, view, stages, top + number * _ROW, scale)
    if view.limit is not None:
        x, bottom = _BAR_LEFT + view.limit * scale, top + len(groups) * _ROW - 4
        canvas.line(x, top - 4, x, bottom, INK, dashed=True)
        text = f"{view.limit / view.unit:.1f} can be planned with"
        align = "left" if x < (_BAR_LEFT + _BAR_RIGHT) / 2 else "right"
        canvas.text(x, bottom + 9, text, NORMAL, align=align, color=FAINT)
    ranks.draw(canvas, _HEAD + stages_height + 12)
    canvas.save(path)


def _group_stages(view: LayoutView) -> list[range]:
    """The stages of each row: consecutive ones that have the same share one."""

    def traits(stage: int) -> tuple[object, ...]:
        ends = stage in (0, view.topology.pp - 1)
        return view.bars[stage], [len(chunk) for chunk in view.split.stages[stage]], ends and stage

    alike = (list(stages) for _, stages in groupby(range(view.topology.pp), key=traits))
    groups = [range(stages[0], stages[-1] + 1) for stages in alike]
    if len(groups) <= MOST_STAGES:
        return groups
    half = MOST_STAGES // 2
    between = range(groups[half].start, groups[-half].start)
    return [*groups[:half], between, *groups[-half:]]


def _draw_stage(canvas: Canvas, view: LayoutView, stages: range, y: float, scale: float) -> None:
    per_stage = view.topology.world_size // view.topology.pp
    held = range(stages.start * per_stage, stages.stop * per_stage)
    text = f"stage{'s' * (len(stages) > 1)} {ranges(stages)}"
    right = canvas.text(MARGIN, y + 9, text, NORMAL, bold=True)
    ranks = f"rank{'s' * (len(held) > 1)} {ranges(held)}"
    canvas.text(right + 10, y + 9, ranks, NORMAL, color=FAINT)
    canvas.text(MARGIN, y + 25, _describe_layers(view, stages), NORMAL)
    bar = max((view.bars[stage] for stage in stages), key=_size_of)
    x = float(_BAR_LEFT)
    for part in bar:
        width = part.size * scale
        canvas.box(x, y + 3, width, 26, fill=part.fill, hatch=part.hatch)
        size = f"{part.size / view.unit:.1f}"
        if width > len(size) * 7.5 + 4:
            if part.hatch:
                room = len(size) * 7.5
                canvas.box(x + (width - room) / 2, y + 9, room, 14, fill=part.fill, edge=part.fill)
            canvas.text(x + width / 2, y + 16, size, NORMAL, align="center", color=part.ink)
        x += width
    most = "\u2264 " if len({_size_of(view.bars[stage]) for stage in stages}) > 1 else ""
    label = f"{most}{_size_of(bar) / view.unit:.1f}"
    canvas.text(WIDTH - MARGIN, y + 16, label, NORMAL, align="right", bold=True)


def _describe_layers(view: LayoutView, stages: range) -> str:
    """The layers of some stages, in words that fit a row."""
    chunks = [view.split.stages[stage] for stage in stages]
    layers = sorted(layer for stage in chunks for chunk in stage for layer in chunk)
    sizes = {sum(map(len, stage)) for stage in chunks}
    text = f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"
    if len(text) > 26:
        first = ", ".join(ranges(chunk) for chunk in chunks[0][:2])
        text = f"layers {first}, ... {ranges(chunks[0][-1])}"
    if len(stages) > 1:
        text += f", {min(sizes)} each" if len(sizes) == 1 else f", {min(sizes)} to {max(sizes)}"
    ends = ((0, "embedding"), (view.topology.pp - 1, "head"))
    return ", ".join([text, *(end for stage, end in ends if stage in stages)])


_CELL_HEIGHT, _FRAME, _LABEL = 32, 6, 18
_MOST_COLUMNS, _MOST_ROWS, _LOW = 8, 4, 30


@dataclass(frozen=True)
class _Ranks:
    """The ranks of the first stage: a frame for each replica that is drawn, with a column for each
    tensor-parallel rank and a row for each context-parallel rank; None stands for those left out.
    """

    view: LayoutView
    columns: tuple[int | None, ...]
    rows: tuple[int | None, ...]
    replicas: int

    @classmethod
    def of(cls, view: LayoutView) -> _Ranks:
        at = view.topology
        columns, rows = _abbreviate(at.tp, _MOST_COLUMNS), _abbreviate(at.cp, _MOST_ROWS)
        found = cls(view, columns, rows, at.dp)
        fitting = found._across * 2
        if at.dp > fitting:
            fitting -= 1  # the place of those that are left out
        return cls(view, columns, rows, min(at.dp, fitting))

    @property
    def _cell(self) -> float:
        """The width of a cell."""
        return 76.0 if self.view.experts is not None else 62.0

    @property
    def _frame(self) -> float:
        """The width of a frame."""
        return self._cell * len(self.columns) + 2 * _FRAME

    @property
    def _across(self) -> int:
        """How many frames fit beside each other."""
        return max(1, int((WIDTH - 2 * MARGIN + 10) // (self._frame + 10)))

    @property
    def _frame_height(self) -> float:
        return _LABEL + _CELL_HEIGHT * len(self.rows) + 2 * _FRAME

    @property
    def height(self) -> float:
        """Pixels of the whole."""
        return 24 + self._frames_height + 17 * len(self._notes())

    @property
    def _frames_height(self) -> float:
        """Pixels of all frames. A line with nothing but the number of those left out is low."""
        lines, beside = divmod(self.replicas, self._across)
        height = (lines + bool(beside)) * (self._frame_height + 10)
        return height + (0 if beside or not self._left_out else _LOW + 10)

    @property
    def _left_out(self) -> int:
        return self.view.topology.dp - self.replicas

    def draw(self, canvas: Canvas, top: float) -> None:
        """Draw them below `top`."""
        at = self.view.topology
        text = "ranks of one replica" if at.pp == at.dp == 1 else "ranks of the first stage"
        right = canvas.text(MARGIN, top + 6, text, NORMAL, bold=True)
        if at.pp > 1:
            per_stage = at.world_size // at.pp
            text = f"those of stage s have numbers larger by {per_stage} s"
            canvas.text(right + 16, top + 6, text, NORMAL, color=FAINT)
        top += 24
        for number in range(self.replicas):
            self._draw_replica(canvas, number, *self._corner(number, top))
        if self._left_out:
            x, y = self._corner(self.replicas, top)
            alone = self.replicas % self._across == 0
            width, height = self._frame, _LOW if alone else self._frame_height
            canvas.box(x, y, width, height, edge=FAINT, dashed=True)
            text = f"x {self._left_out} more" + " replicas" * (width > 140)
            canvas.text(x + width / 2, y + height / 2, text, align="center")
        y = top + self._frames_height + 8
        for note in self._notes():
            canvas.text(MARGIN, y, note, NORMAL)
            y += 17

    def _corner(self, number: int, top: float) -> tuple[float, float]:
        down, across = divmod(number, self._across)
        return MARGIN + across * (self._frame + 10), top + down * (self._frame_height + 10)

    def _draw_replica(self, canvas: Canvas, dp: int, x: float, y: float) -> None:
        canvas.box(x, y, self._frame, self._frame_height, fill="#f2f2f2", edge=FAINT)
        canvas.text(x + _FRAME, y + 11, f"replica {dp}", NORMAL, bold=True)
        for down, cp in enumerate(self.rows):
            for across, tp in enumerate(self.columns):
                left = x + _FRAME + across * self._cell
                upper = y + _LABEL + _FRAME / 2 + down * _CELL_HEIGHT
                self._draw_rank(canvas, dp, cp, tp, left, upper)

    def _draw_rank(
        self, canvas: Canvas, dp: int, cp: int | None, tp: int | None, x: float, y: float
    ) -> None:
        at = self.view.topology
        middle, width = x + self._cell / 2, self._cell - 2
        if cp is None or tp is None:
            canvas.text(middle, y + _CELL_HEIGHT / 2, "...", align="center", color=FAINT)
            return
        canvas.box(x + 1, y + 1, width, _CELL_HEIGHT - 2)
        rank = at.rank(Coords(pp=0, dp=dp, cp=cp, tp=tp))
        canvas.text(middle, y + 10, f"rank {rank}", SMALL, align="center", bold=True)
        places = (("tp", tp, at.tp), ("cp", cp, at.cp))
        names = [f"{axis} {place}" for axis, place, size in places if size > 1]
        second = ", ".join(names)
        if self.view.experts is not None:
            held = at.experts_of(at.expert_coords(rank).ep, self.view.experts)
            second = f"exp {ranges(held)}"
        canvas.text(middle, y + 22, second, SMALL, align="center", color=FAINT)

    def _notes(self) -> list[str]:
        """What each axis shares out."""
        at, notes = self.view.topology, []
        if at.tp > 1:
            notes.append(f"tp: {at.tp} ranks side by side each have 1/{at.tp} of every matrix")
        if at.cp > 1:
            notes.append(f"cp: {at.cp} rows of ranks each compute 1/{at.cp} of a sequence")
        if at.dp > 1:
            text = f"dp: {at.dp} replicas train on other rows and hold the same weights"
            notes.append(text + (" but for experts" if at.experts_apart else ""))
        if self.view.shards_optimizer and at.dp * at.cp > 1:
            text = f"optimizer: each rank has 1/{at.dp * at.cp} of the states of its weights"
            apart = self.view.experts is not None and at.edp != at.dp * at.cp
            notes.append(text + (f", of its experts 1/{at.edp}" if apart else ""))
        if self.view.experts is not None:
            each = self.view.experts // at.ep
            text = f"experts: {each} of the {self.view.experts} of a layer on each rank"
            text += f", each split over {at.expert_tp} ranks" if at.expert_tp > 1 else ""
            notes.append(text + (f"; {at.edp} ranks hold the same" if at.edp > 1 else ""))
        return notes


def _abbreviate(number: int, most: int) -> tuple[int | None, ...]:
    """0, 1, ... up to `number`, with None in place of what is too many."""
    if number <= most:
        return tuple(range(number))
    return (*range(most - 2), None, number - 1)
