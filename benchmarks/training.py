"""A training step of the policy relative to the same step as a plain Megatron-Core loop, of a dense
model (row 10) and of one with experts (row 16).
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.checkpoints import Size, write_checkpoint
from benchmarks.processes import run_fresh
from benchmarks.results import Measurement, ratio_of_minima

DENSE = Size(hidden=512, ffn=1408, layers=4, heads=8, groups=4, vocab=8192)
EXPERTS = Size(hidden=512, ffn=352, layers=4, heads=8, groups=4, vocab=8192, experts=16)


def over_plain_loop(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of `MegatronPolicy.train` relative to the loop's, alternating in one process."""
    return _over_plain_loop(write_checkpoint(folder / "trained", DENSE), repetitions)


def experts_over_plain_loop(folder: Path, repetitions: int) -> Measurement:
    """The same with 16 experts in each layer, of which a token takes 4."""
    return _over_plain_loop(write_checkpoint(folder / "trained experts", EXPERTS), repetitions)


def paused_share(folder: Path, repetitions: int) -> Measurement:
    """By the clock, the seconds in which an engine that follows every step by what has changed
    cannot answer, of those of the steps.
    """
    path = write_checkpoint(folder / "followed", DENSE)
    result = run_fresh("benchmarks.pause_once", path, str(4 * repetitions))
    seconds = {name: tuple(result[name]) for name in ("pauses", "steps")}
    ratio = statistics.median(seconds["pauses"]) / statistics.median(seconds["steps"])
    beside = {"the longest": max(seconds["pauses"]) / min(seconds["steps"]), "sent": result["sent"]}
    return Measurement(ratio, seconds, "the engine's last weights are the policy's", beside)


def _over_plain_loop(path: Path, repetitions: int) -> Measurement:
    result = run_fresh("benchmarks.train_steps", path, str(2 * repetitions))
    seconds = {name: tuple(result[name]) for name in ("plain loop", "ours")}
    ratio = ratio_of_minima(seconds["ours"], seconds["plain loop"])
    return Measurement(ratio, seconds, result["verified"])
