"""Import of HF weights: time over its floor, memory, growth with the tensors (rows 1 to 3).

Knows which programs of import_once.py to run in which order; each run is a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.processes import run_fresh
from benchmarks.results import Measurement, ratio_of_minima

PROGRAMS = "benchmarks.import_once"

FEW_LAYERS, MANY_LAYERS = 50, 400
SAME_BITS = (
    "in every run each HF tensor equals, bit for bit, what the table takes out of its parameter"
)


def over_floor(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of an import at the 0.5B shape over those of the floor."""
    path = _half_billion(folder)
    seconds = _alternate(repetitions, {"floor": ("floor", path), "ours": ("ours", path)})
    ratio = ratio_of_minima(seconds["ours"], seconds["floor"])
    return Measurement(ratio, seconds, SAME_BITS)


def peak_memory(folder: Path, repetitions: int) -> Measurement:
    """Highest anonymous memory during the import, less that before it, over bytes of weights."""
    path = _half_billion(folder)
    results = [run_fresh(PROGRAMS, "memory", path) for _ in range(repetitions)]
    # What was sampled can only be too low.
    ratio = max(result["peak_bytes"] / result["weight_bytes"] for result in results)
    seconds = {"ours, watched": tuple(result["cpu_s"] for result in results)}
    return Measurement(ratio, seconds, SAME_BITS)


def growth(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of an import of 400 layers over those of 50: eight times the tensors."""
    from benchmarks.checkpoints import narrow, write_checkpoint

    few = write_checkpoint(folder / "few", narrow(FEW_LAYERS))
    many = write_checkpoint(folder / "many", narrow(MANY_LAYERS))
    programs = {
        f"{name}, {layers} layers": (name, path)
        for name in ("floor", "ours")
        for layers, path in ((FEW_LAYERS, few), (MANY_LAYERS, many))
    }
    seconds = _alternate(repetitions, programs)
    ratio = ratio_of_minima(
        seconds[f"ours, {MANY_LAYERS} layers"], seconds[f"ours, {FEW_LAYERS} layers"]
    )
    return Measurement(ratio, seconds, SAME_BITS)


def _half_billion(folder: Path) -> Path:
    from benchmarks.checkpoints import HALF_BILLION, write_checkpoint

    path = folder / "half-billion"
    return path if path.exists() else write_checkpoint(path, HALF_BILLION)


def _alternate(
    repetitions: int, programs: Mapping[str, tuple[str, Path]]
) -> dict[str, tuple[float, ...]]:
    """CPU seconds of each program, run by turns; a floor, which is first, is run last as well."""
    order = list(programs) * repetitions
    order += [label for label, (program, _) in programs.items() if program == "floor"]
    seconds: dict[str, tuple[float, ...]] = dict.fromkeys(programs, ())
    for label in order:
        seconds[label] += (run_fresh(PROGRAMS, *programs[label])["cpu_s"],)
    return seconds
