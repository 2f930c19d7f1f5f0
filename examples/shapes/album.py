"""Draws pictures with the answers that two policies gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from quickstart.task import reward

from .task import Problem

ROWS, COLUMNS = 2, 6
SIDE_INCHES, DPI = 1.6, 110
RIGHT, WRONG = "#27704a", "#c0392b"


def draw_album(
    problems: Sequence[Problem], answers: Mapping[str, Sequence[str]], path: Path
) -> None:
    """Write a PNG of the first problems, each above what it was answered, by who did."""
    size = (COLUMNS * SIDE_INCHES, ROWS * SIDE_INCHES * 1.45)
    figure, axes = plt.subplots(ROWS, COLUMNS, figsize=size, layout="constrained")
    for number, (axis, problem) in enumerate(zip(axes.flat, problems, strict=False)):
        axis.imshow(problem.draw())
        axis.set_title(f"how many {problem.kind}s?", fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
        for line, (who, texts) in enumerate(answers.items()):
            text = texts[number]
            color = RIGHT if reward(problem, text) else WRONG
            place = {"xy": (0.5, 0), "xytext": (0, -12 * (line + 1)), "va": "baseline"}
            units = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
            axis.annotate(f"{who}:{text or ' nothing'}", color=color, fontsize=8, **place, **units)
    figure.suptitle("Answers to pictures that were never trained on", fontsize=9)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
