"""A training step of the policy relative to the same step as a plain Megatron-Core loop
(row 10).
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.processes import run_fresh
from benchmarks.results import Measurement, ratio_of_minima


def over_plain_loop(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of `MegatronPolicy.train` relative to the loop's, alternating in one process."""
    from benchmarks.checkpoints import Size, write_checkpoint

    size = Size(hidden=512, ffn=1408, layers=4, heads=8, groups=4, vocab=8192)
    path = write_checkpoint(folder / "trained", size)
    result = run_fresh("benchmarks.train_steps", path, str(2 * repetitions))
    seconds = {name: tuple(result[name]) for name in ("plain loop", "ours")}
    ratio = ratio_of_minima(seconds["ours"], seconds["plain loop"])
    return Measurement(ratio, seconds, result["verified"])
