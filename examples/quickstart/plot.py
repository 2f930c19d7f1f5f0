"""Draws the curves of a run."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

from .journal import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT = "#1a1a1a", "#4d4d4d"
# Told apart in black and white too: what is measured once is light and thin, what counts is dark.
DARK, LIGHT = "#0b4f8a", "#9cc3e6"
TEXT, TITLE = 8.0, 9.5
WIDTH_INCHES, HEIGHT_INCHES, DPI = 9.6, 5.8, 140
COLORS = 64


def draw_curves(journal: Records, path: Path, reward_after_sft: float) -> None:
    """Write a PNG: GRPO's reward above; below, the losses, how far GRPO has moved, and how far the
    sampler's log-probabilities are from training's.
    """
    figure, axes = plt.subplot_mosaic(
        [["reward"] * 4, ["sft", "grpo", "kl", "mismatch"]],
        figsize=(WIDTH_INCHES, HEIGHT_INCHES),
        height_ratios=(1.5, 1),
        layout="constrained",
    )
    _draw_reward(axes["reward"], journal, reward_after_sft)
    _draw_smoothed(axes["sft"], journal, "sft", "loss")
    _label(axes["sft"], "SFT: loss per token", "optimizer step")
    _draw_smoothed(axes["grpo"], journal, "grpo", "loss")
    _label(axes["grpo"], "GRPO: loss per token", "step")
    _draw_smoothed(axes["kl"], journal, "grpo", "kl")
    _label(axes["kl"], "GRPO: KL from SFT, per token", "step")
    _draw_mismatch(axes["mismatch"], journal)
    axes["sft"].legend(loc="upper right", frameon=False, fontsize=TEXT)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=DPI)
    plt.close(figure)
    # A palette makes the file a third as large.
    Image.open(drawn).convert("RGB").quantize(COLORS).save(path, optimize=True)


def _draw_reward(axes: Axes, journal: Records, reward_after_sft: float) -> None:
    steps, rewards = journal.series("grpo", "reward")
    axes.plot(steps, rewards, color=LIGHT, linewidth=1, label="on problems of the step")
    last = steps[-1]
    steps, rewards = journal.series("grpo", "held_out_reward")
    axes.plot(
        [0, *steps],
        [reward_after_sft, *rewards],
        color=DARK,
        linewidth=2,
        marker="o",
        markersize=4,
        label="on problems that are held out",
    )
    for level, text in ((reward_after_sft, "after SFT"), (2 * reward_after_sft, "twice that")):
        if level > 1:
            continue
        axes.axhline(level, color=FAINT, linewidth=1, linestyle="--")
        axes.annotate(
            f"{text}: {level:.2f}",
            (last, level),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            fontsize=TEXT,
            color=INK,
        )
    axes.set_ylim(0, 1.04)
    axes.legend(loc="lower center", ncols=2, frameon=False, fontsize=TEXT)
    _label(axes, "GRPO: reward (share of right answers, sampled)", "step")


def _draw_mismatch(axes: Axes, journal: Records) -> None:
    """The mean and the largest distance of a step, on whole decades."""
    found = []
    for name, color, label in (("_max", LIGHT, "largest"), ("", DARK, "mean")):
        steps, values = journal.series("grpo", f"train_rollout_logprob_abs_diff{name}")
        axes.plot(steps, values, color=color, linewidth=1.5, label=label)
        found += [value for value in values if value > 0]
    if found:
        low, high = (math.log10(each) for each in (min(found), max(found)))
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(low), 10 ** (math.ceil(high) + 1))
    axes.legend(loc="upper right", ncols=2, frameon=False, fontsize=TEXT)
    _label(axes, "|log p|, training to sampler", "step")


def _draw_smoothed(axes: Axes, journal: Records, phase: str, name: str) -> None:
    """The values and their average; of values far above all others only where they are."""
    steps, values = journal.series(phase, name)
    axes.plot(steps, values, color=LIGHT, linewidth=1, label="each step")
    means = smoothed(values)
    axes.plot(steps, means, color=DARK, linewidth=2, label="averaged")
    highest = max(values)
    usual = sorted(values)[int(0.98 * (len(values) - 1))]
    if highest < 2 * usual or usual <= 0:
        return
    low = min(0.0, *values)
    top = 1.3 * max(usual, *means)
    axes.set_ylim(low - 0.05 * (top - low), top)
    at = steps[values.index(highest)]
    left = at < steps[-1] / 2
    axes.annotate(
        f"{highest:.2g} in step {at:.0f}",
        (at, top),
        xytext=(4 if left else -4, -3),
        textcoords="offset points",
        ha="left" if left else "right",
        va="top",
        fontsize=TEXT,
        color=INK,
    )


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
    axes.set_title(title, fontsize=TITLE, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=TEXT, color=INK)
    axes.tick_params(labelsize=TEXT)
    axes.grid(color="#e0e0e0", linewidth=0.6)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
