"""Export of HF weights: time relative to one copy of the bytes, time per tensor, collectives per
tensor (rows 4 to 6).

Runs each program in a new process, or one process per rank.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.checkpoints import SIZES, Size, narrow, write_checkpoint
from benchmarks.importing import MANY_LAYERS, sized
from benchmarks.processes import run_fresh, run_ranks
from benchmarks.results import Measurement, ratio_of_minima

PROGRAMS, RANKS = "benchmarks.export_once", "benchmarks.collectives_once"
ADAPTERS = "benchmarks.adapters_once"
SAME_BITS = "each HF tensor that was exported equals the checkpoint's, bit for bit"
LAYOUTS = {"TP2": (2, 1), "PP2": (1, 2)}
OF_99_TENSORS = Size(hidden=128, ffn=256, layers=8, heads=4, groups=2, vocab=1024, tied=False)


def over_memcpy(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of an export relative to one copy of its bytes, for the worse size.

    The copy is torch's, as the export uses it. Also reports memmove, which streams a piece of
    that size past the cache, unlike any copy of single tensors, and the first export, which
    makes the plan.
    """
    seconds: dict[str, tuple[float, ...]] = {}
    ratios: dict[str, float] = {}
    beside: dict[str, float] = {}
    for size in SIZES:
        result = run_fresh(PROGRAMS, "over memcpy", sized(folder, size), str(10 * repetitions))
        runs = {name: tuple(of) for name, of in result["cpu_s"].items()}
        ratios[size] = ratio_of_minima(runs["ours"], runs["copy_"])
        for name in ("copy_", "memmove"):
            beside[f"{size} / {name}"] = round(ratio_of_minima(runs["ours"], runs[name]), 3)
        beside[f"{size}, the first / copy_"] = round(
            ratio_of_minima(runs["first"], runs["copy_"]), 3
        )
        seconds |= {f"{name}, {size}": of for name, of in runs.items()}
    return Measurement(max(ratios.values()), seconds, SAME_BITS, beside)


def per_tensor(folder: Path, repetitions: int) -> Measurement:
    """Microseconds of an export per tensor, beyond the same copies between prepared views.

    Also reports the full time of an export, copies included.
    """
    path = folder / "many"
    if not path.exists():
        write_checkpoint(path, narrow(MANY_LAYERS))
    result = run_fresh(PROGRAMS, "over copies", path, str(10 * repetitions))
    seconds = {name: tuple(of) for name, of in result["cpu_s"].items()}
    copies = min(seconds["a loop"] + seconds["one call"])

    def microseconds(cpu_s: float) -> float:
        return 1e6 * cpu_s / result["tensors"]

    beside = {
        "with the copies": round(microseconds(min(seconds["ours"])), 2),
        "the copies": round(microseconds(copies), 2),
        "the first, with copies": round(microseconds(seconds["first"][0]), 2),
    }
    beyond = microseconds(min(seconds["ours"]) - copies)
    return Measurement(beyond, seconds, f"{SAME_BITS}; {result['tensors']} tensors", beside)


def collectives(folder: Path, repetitions: int) -> Measurement:
    """Collective calls of a rank per exported tensor, for the layout with more."""
    path = write_checkpoint(folder / "of-99", OF_99_TENSORS)
    ratios: dict[str, float] = {}
    beside: dict[str, float] = {}
    for name, (tp, pp) in LAYOUTS.items():
        for result in run_ranks(tp * pp, RANKS, path, str(tp), str(pp)):
            calls, tensors = result["calls"], result["tensors"]
            if any("torch.distributed" in count for count in calls.values()):
                raise RuntimeError(f"an export used torch.distributed's own groups: {calls}")
            again = sum(calls["again"].values())
            ratios[name] = max(ratios.get(name, 0.0), again / tensors)
            beside[f"calls, {name}"] = again
            beside[f"of the agreement, {name}"] = sum(calls["agreement"].values())
    return Measurement(max(ratios.values()), {}, f"{SAME_BITS}, on every rank", beside)


def adapters_moved(folder: Path, repetitions: int) -> Measurement:
    """Bytes that collectives deliver to a rank when adapters are handed over, relative to the
    adapters' own, for the layout with more.
    """
    path = write_checkpoint(folder / "adapted-of-99", OF_99_TENSORS)
    ratios: dict[str, float] = {}
    beside: dict[str, float] = {}
    for name, (tp, pp) in LAYOUTS.items():
        for result in run_ranks(tp * pp, ADAPTERS, path, str(tp), str(pp)):
            moved = result["moved"] / result["adapters"]
            ratios[name] = max(ratios.get(name, 0.0), moved)
            beside[f"{name}, of the whole model"] = round(result["moved"] / result["whole"], 4)
    verified = "all tensors that were handed over are adapters"
    return Measurement(max(ratios.values()), {}, verified, beside)
