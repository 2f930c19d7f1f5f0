"""Import of HF weights: time relative to the floor, memory, growth with the tensors (rows 1 to 3);
of fp8 weights, time relative to dequantising and one copy (row 15); of experts, time per tensor
relative to a dense model's (row 17).

Runs the programs of import_once.py, each in a new process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.checkpoints import (
    MANY_EXPERTS,
    SIZES,
    narrow,
    write_checkpoint,
    write_quantised,
)
from benchmarks.processes import run_fresh
from benchmarks.results import Measurement, ratio_of_minima
from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.table import bind

PROGRAMS = "benchmarks.import_once"

FEW_LAYERS, MANY_LAYERS = 50, 400
SAME_BITS = (
    "in every run each HF tensor equals, bit for bit, what the table takes out of its parameter"
)

DEQUANTISED = (
    "in every run each HF tensor, multiplied by the scales of its blocks in float32 and rounded to "
    "bfloat16, equals bit for bit what the table takes out of its parameter"
)


def over_floor(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of an import relative to the floor, for the worse size."""
    programs = {
        f"{name}, {size}": (name, sized(folder, size))
        for name in ("floor", "ours")
        for size in SIZES
    }
    seconds = _alternate(repetitions, programs)
    ratios = [ratio_of_minima(seconds[f"ours, {s}"], seconds[f"floor, {s}"]) for s in SIZES]
    return Measurement(max(ratios), seconds, SAME_BITS)


def dequantising(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of an import of fp8 weights relative to the floor, for the worse size."""
    paths = {
        size: write_quantised(folder / f"{size}-fp8", dimensions)
        for size, dimensions in SIZES.items()
    }
    programs = {
        f"{name}, {size}": (name, path)
        for name in ("floor", "ours")
        for size, path in paths.items()
    }
    seconds = _alternate(repetitions, programs)
    ratios = [ratio_of_minima(seconds[f"ours, {s}"], seconds[f"floor, {s}"]) for s in SIZES]
    return Measurement(max(ratios), seconds, DEQUANTISED)


def peak_memory(folder: Path, repetitions: int) -> Measurement:
    """Peak anonymous memory of the import, minus that before it, relative to the bytes of
    weights.
    """
    results = {
        size: [run_fresh(PROGRAMS, "memory", sized(folder, size)) for _ in range(repetitions)]
        for size in SIZES
    }
    # Sampling can only underestimate the peak.
    ratio = max(
        run["peak_bytes"] / run["weight_bytes"] for runs in results.values() for run in runs
    )
    seconds = {
        f"ours, watched, {size}": tuple(run["cpu_s"] for run in runs)
        for size, runs in results.items()
    }
    return Measurement(ratio, seconds, SAME_BITS)


def growth(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of an import of 400 layers relative to 50: eight times the tensors."""
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


def experts_per_tensor(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of an import per HF tensor: of 48 layers of 128 experts relative to 400 dense
    layers, both of narrow matrices.
    """
    paths = {"dense": folder / "many", "experts": folder / "experts"}
    if not paths["dense"].exists():
        write_checkpoint(paths["dense"], narrow(MANY_LAYERS))
    write_checkpoint(paths["experts"], MANY_EXPERTS)
    programs = {f"ours, {name}": ("ours", path) for name, path in paths.items()}
    seconds = _alternate(repetitions, programs)
    tensors = {name: len(bind(read_config(path)).hf_shapes()) for name, path in paths.items()}
    per_tensor = {name: min(seconds[f"ours, {name}"]) / tensors[name] for name in paths}
    beside = {f"{name}, microseconds a tensor": 1e6 * of for name, of in per_tensor.items()}
    return Measurement(per_tensor["experts"] / per_tensor["dense"], seconds, SAME_BITS, beside)


def sized(folder: Path, size: str) -> Path:
    """The checkpoint of one of `SIZES`, written on first use."""
    path = folder / size
    return path if path.exists() else write_checkpoint(path, SIZES[size])


def _alternate(
    repetitions: int, programs: Mapping[str, tuple[str, Path]]
) -> dict[str, tuple[float, ...]]:
    """CPU seconds of each program, run alternately; a floor, which is first, also runs last."""
    order = list(programs) * repetitions
    order += [label for label, (program, _) in programs.items() if program == "floor"]
    seconds: dict[str, tuple[float, ...]] = dict.fromkeys(programs, ())
    for label in order:
        seconds[label] += (run_fresh(PROGRAMS, *programs[label])["cpu_s"],)
    return seconds
