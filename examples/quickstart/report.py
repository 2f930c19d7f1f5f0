"""Summarises a finished run: samples, a picture, a file of numbers and a final summary."""

from __future__ import annotations

import json

from .demo import Options, Outcome
from .display import Display
from .journal import Journal
from .plot import draw_curves
from .task import Problems

SAMPLES = 6


def conclude(
    options: Options, problems: Problems, outcome: Outcome, display: Display, journal: Journal
) -> None:
    """Show samples and the result of the run, and write `curves.png` and `summary.json`."""
    before, after = outcome.before.texts[:SAMPLES], outcome.after.texts[:SAMPLES]
    display.samples(problems.held_out[:SAMPLES], {"after SFT": before, "after GRPO": after})
    summarise(options, outcome, display, journal)


def summarise(options: Options, outcome: Outcome, display: Display, journal: Journal) -> None:
    """Show the numbers of the run, and write `curves.png` and `summary.json`."""
    before, after, check = outcome.before, outcome.after, outcome.check
    picture = options.output / "curves.png"
    draw_curves(journal, picture, before.reward)
    numbers = {
        "seed": options.seed,
        "reward_after_sft": before.reward,
        "reward_at_end": after.reward,
        "factor": outcome.factor,
        "logprob_difference": check.difference,
        "logprob_tolerance": check.tolerance,
        "seconds": round(display.seconds, 1),
    }
    (options.output / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n")
    gained = "" if outcome.factor is None else f"  ({outcome.factor:.1f} times as much)"
    agrees = "agrees" if check.passed else "DOES NOT AGREE"
    rows = [
        ("reward after SFT", f"{before.reward:.3f}"),
        ("reward after GRPO", f"{after.reward:.3f}{gained}"),
        (
            "export in transformers",
            f"{agrees}: log-probabilities differ by {check.difference:.1e} at most "
            f"(tolerance {check.tolerance:.0e})",
        ),
        ("trained policy", str(options.output / "policy")),
        ("curves", str(picture)),
        ("time", f"{display.seconds:.0f} s"),
    ]
    display.summary("check passed" if check.passed else "check failed", rows, good=check.passed)
