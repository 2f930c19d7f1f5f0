"""Shows progress in the terminal, or as plain lines if there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from .task import Question, reward

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
LINES_PER_PHASE = 12
SHOWN = {"reward": "reward", "loss": "loss", "kl": "kl", "held_out_reward": "held out"}
"""The metrics that fit a line of 80 columns; all are in the file of the run."""

Metrics = dict[str, float]


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """A curve of at most `width` characters; each shows the mean of its share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


class Display:
    """The terminal output of a run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since this display was made."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Print one line."""
        line = Text.assemble((f"{self.seconds:5.0f} s  ", "dim"), text)
        self._console.print(line, soft_wrap=True)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show that something takes a while, with no steps to count."""
        if not self._live:
            self.say(text)
            yield
            return
        with self._console.status(text):
            yield
        self.say(text)

    @contextmanager
    def phase(self, title: str, steps: int, curve: str) -> Iterator[Callable[[Metrics], None]]:
        """Count steps: yields a callback for each step's metrics, one of which is drawn as
        a curve.
        """
        board = _Board(title, steps, curve)
        if not self._live:
            yield lambda metrics: self._plain(title, steps, metrics)
        else:
            with Live(board.render(), console=self._console, refresh_per_second=8) as live:

                def show(metrics: Metrics) -> None:
                    board.update(metrics)
                    live.update(board.render())

                yield show

    def samples(self, problems: Sequence[Question], columns: dict[str, Sequence[str]]) -> None:
        """Show problems with the answers of several policies, marking right and wrong ones."""
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
        for name in ("prompt", *columns):
            table.add_column(name)
        for row, problem in enumerate(problems):
            texts = [column[row] for column in columns.values()]
            table.add_row(problem.prompt, *[_marked(problem, text) for text in texts])
        self._console.print(table)

    def summary(self, title: str, rows: Sequence[tuple[str, str]], good: bool) -> None:
        """Show the final names and values in a frame."""
        table = Table.grid(padding=(0, 3, 0, 0))
        for name, value in rows:
            table.add_row(Text(name, style="dim"), Text(value))
        style = "green" if good else "red"
        self._console.print(Panel(table, title=title, border_style=style, expand=False))

    def _plain(self, title: str, steps: int, metrics: Metrics) -> None:
        step = int(metrics["step"])
        if step == 1 or step == steps or step % max(1, steps // LINES_PER_PHASE) == 0:
            self.say(f"{title}  {step:>4}/{steps}  {_listed(metrics)}")


class _Board:
    """The live view of one phase: a bar, the latest metrics, and a curve of one of them."""

    def __init__(self, title: str, steps: int, curve: str) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
        )
        self._bar = self._progress.add_task(title, total=steps)
        self._curve = curve
        self._values: list[float] = []
        self._latest: Metrics = {}

    def update(self, metrics: Metrics) -> None:
        self._progress.update(self._bar, completed=metrics["step"])
        self._values.append(metrics[self._curve])
        self._latest |= metrics

    def render(self) -> Group:
        curve = Text.assemble((f"  {self._curve} ", "dim"), (sparkline(self._values), "cyan"))
        return Group(self._progress, curve, Text(f"  {_listed(self._latest)}"))


def _listed(metrics: Metrics) -> str:
    shown = [(text, metrics[name]) for name, text in SHOWN.items() if name in metrics]
    return "  ".join(f"{text} {value:.3f}" for text, value in shown)


def _marked(problem: Question, text: str) -> Text:
    right = reward(problem, text) > 0
    return Text(f"{'✓' if right else '✗'}{text}", style="green" if right else "red")
