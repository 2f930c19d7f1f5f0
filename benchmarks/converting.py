"""Checkpoint conversion: time relative to reading and writing the same bytes (row 13), and memory.

Runs the programs of convert_once.py, each in a new process.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.importing import sized
from benchmarks.processes import run_fresh
from benchmarks.results import Measurement, ratio_of_minima

PROGRAMS = "benchmarks.convert_once"
MOST_MEMORY = 100 * 2**20


def over_copying(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of a conversion at the 1.5B shape relative to the floor, in the worse direction.

    RuntimeError if a conversion is not exact, or takes too much memory.
    """
    hf, mcore = sized(folder, "1.5B"), folder / "1.5B-mcore"
    back, copy = folder / "1.5B-back", folder / "1.5B-copy"
    turns = [("floor", hf, copy), ("to mcore", hf, mcore), ("to hf", mcore, back)]
    seconds: dict[str, tuple[float, ...]] = {name: () for name, _, _ in turns}
    peaks = dict.fromkeys(seconds, 0.0)
    for name, source, destination in [*turns * repetitions, turns[0]]:
        result = run_fresh(PROGRAMS, name, source, destination)
        seconds[name] += (result["cpu_s"],)
        peaks[name] = max(peaks[name], result["peak_bytes"])
    shutil.rmtree(copy)
    del peaks["floor"]
    if max(peaks.values()) > MOST_MEMORY:
        raise RuntimeError(f"conversion took more than {MOST_MEMORY} bytes of memory: {peaks}")
    for other in (mcore, back):
        run_fresh(PROGRAMS, "check", hf, other)
        shutil.rmtree(other)
    ratios = [ratio_of_minima(seconds[name], seconds["floor"]) for name in peaks]
    mebibytes = {name: round(peak / 2**20) for name, peak in peaks.items()}
    return Measurement(
        max(ratios),
        seconds,
        "both checkpoints equal their source bit by bit; memory at the peak, beyond that of the "
        f"imports, in MiB: {mebibytes}",
    )
