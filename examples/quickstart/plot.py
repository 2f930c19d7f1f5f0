"""Draws the curves of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .journal import Journal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT = "#222222", "#777777"
BLUE, ORANGE, GREEN = "#1f6fb4", "#d9662b", "#2f8f5b"


def draw_curves(journal: Journal, path: Path, reward_after_sft: float) -> None:
    """Write a PNG: GRPO's reward above; below, the losses and how far GRPO has moved."""
    figure, axes = plt.subplot_mosaic(
        [["reward"] * 3, ["sft", "grpo", "kl"]],
        figsize=(11, 7.2),
        height_ratios=(1.5, 1),
        layout="constrained",
    )
    _draw_reward(axes["reward"], journal, reward_after_sft)
    _draw_smoothed(axes["sft"], journal, "sft", "loss", BLUE)
    _label(axes["sft"], "SFT: loss per token", "optimizer step")
    _draw_smoothed(axes["grpo"], journal, "grpo", "loss", BLUE)
    _label(axes["grpo"], "GRPO: loss per token", "step")
    _draw_smoothed(axes["kl"], journal, "grpo", "kl", ORANGE)
    _label(axes["kl"], "GRPO: KL from the SFT policy, per token", "step")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _draw_reward(axes: Axes, journal: Journal, reward_after_sft: float) -> None:
    steps, rewards = journal.series("grpo", "reward")
    axes.plot(steps, rewards, color=GREEN, alpha=0.35, linewidth=1, label="training problems")
    steps, rewards = journal.series("grpo", "held_out_reward")
    axes.plot(
        [0, *steps],
        [reward_after_sft, *rewards],
        color=GREEN,
        linewidth=2,
        marker="o",
        markersize=4,
        label="held-out problems",
    )
    last = steps[-1]
    for level, text in ((reward_after_sft, "after SFT"), (2 * reward_after_sft, "twice that")):
        axes.axhline(level, color=FAINT, linewidth=1, linestyle="--")
        axes.annotate(
            f"{text}: {level:.2f}",
            (last, level),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=FAINT,
        )
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower center", ncols=2, frameon=False)
    _label(axes, "GRPO: reward (share of right answers, sampled)", "step")


def _draw_smoothed(axes: Axes, journal: Journal, phase: str, name: str, color: str) -> None:
    steps, values = journal.series(phase, name)
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps, smoothed(values), color=color, linewidth=1.8)


def smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    """The exponential moving average of the values, without bias towards zero."""
    result: list[float] = []
    total = norm = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def _label(axes: Axes, title: str, x: str) -> None:
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=9, color=FAINT)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
