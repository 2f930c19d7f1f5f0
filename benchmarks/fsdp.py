"""Transformers' own modules under FSDP2: a training step relative to a plain loop, an import
relative to reading and one copy, an export relative to one copy (rows 21 to 23).
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.checkpoints import HALF_BILLION, Size, write_checkpoint
from benchmarks.processes import run_fresh, run_ranks
from benchmarks.results import Measurement, ratio_of_minima

TRAINED = Size(
    hidden=512, ffn=1408, layers=4, heads=8, groups=4, vocab=8192, dtype="float32", tied=False
)
RANKS = 2
PROGRAM = "benchmarks.transformers_steps"


def over_plain_loop(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of a training step of two ranks relative to the loop's, in the same processes by
    turns.
    """
    path = write_checkpoint(folder / "fsdp trained", TRAINED)
    results = run_ranks(RANKS, PROGRAM, "fsdp", path, str(2 * repetitions))
    seconds = {
        name: tuple(map(sum, zip(*(result[name] for result in results), strict=True)))
        for name in ("plain loop", "ours")
    }
    ratio = ratio_of_minima(seconds["ours"], seconds["plain loop"])
    return Measurement(ratio, seconds, results[0]["verified"])


def import_over_floor(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of an import of 0.5B relative to reading it and one copy in fp32, on one rank."""
    path = _half_billion(folder)
    seconds: dict[str, tuple[float, ...]] = {"floor": (), "ours": ()}
    for name in ["floor", "ours"] * repetitions + ["floor"]:
        seconds[name] += (run_fresh("benchmarks.fsdp_once", name, path)["cpu_s"],)
    verified = "in every run each parameter equals its HF tensor, bit for bit"
    return Measurement(ratio_of_minima(seconds["ours"], seconds["floor"]), seconds, verified)


def export_over_memcpy(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of an export of 0.5B relative to one copy of its bytes, on one rank."""
    path = _half_billion(folder)
    result = run_fresh("benchmarks.fsdp_once", "export", path, str(10 * repetitions))
    seconds = {name: tuple(of) for name, of in result["cpu_s"].items()}
    verified = "each HF tensor that was exported equals the checkpoint's, bit for bit"
    return Measurement(ratio_of_minima(seconds["ours"], seconds["copy_"]), seconds, verified)


def _half_billion(folder: Path) -> Path:
    """A checkpoint in fp32, as the main weights are, written on first use."""
    path = folder / "0.5B, fp32"
    size = Size(**vars(HALF_BILLION) | {"dtype": "float32"})
    return path if path.exists() else write_checkpoint(path, size)
