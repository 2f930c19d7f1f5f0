"""Log-probabilities from hidden states: memory relative to that of all logits, time relative to
their matrix product (rows 7 and 8).

Runs the programs of logprob_once.py and logprob_policy.py, each in a new process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import Size, write_checkpoint
from benchmarks.processes import run_fresh
from benchmarks.results import Measurement, ratio_of_minima

PROGRAMS, POLICY = "benchmarks.logprob_once", "benchmarks.logprob_policy"

FEW, MANY = ("reading", 128), ("reading", 512)
LOGITS, PLAIN = ("logits", 0), ("reading plainly", 512)
TRAINING, TRAINING_PLAIN = ("training", 256), ("training plainly", 256)
Run = tuple[str, int]
Results = dict[Run, list[dict[str, Any]]]

LOGITS_BYTES = 4096 * 151936 * 2
MOST_MEMORY, MOST_TRAINING = 0.65, 0.6
# Relative, over all samples of a result: bf16 has 8 bits.
TOLERANCE = 2**-7


def peak_memory(folder: Path, repetitions: int) -> Measurement:
    """Peak memory of a pass in small chunks relative to the bytes of bf16 logits: of the head alone
    beyond its inputs, and of packed policies, one of them context-parallel, beyond all they hold.

    RuntimeError if larger chunks take too much.
    """
    results = _alternate([FEW, MANY], repetitions, PLAIN) | _of_policies(folder)
    for run in (FEW, MANY):
        _compare(results, run, PLAIN)
        _compare(results, ("packed, CP 2", run[1]), ("packed", run[1]))
    peaks = {run: max(r["peak_bytes"] for r in found) for run, found in results.items()}
    ratios = {run: peak / LOGITS_BYTES for run, peak in peaks.items()}
    if any(ratio > MOST_MEMORY for run, ratio in ratios.items() if run != PLAIN):
        raise RuntimeError(f"memory at the peak over that of all logits: {ratios}")
    return Measurement(
        max(ratio for (_, chunk), ratio in ratios.items() if chunk == FEW[1]),
        _seconds(results),
        f"log-probabilities equal those of plain chunks within {TOLERANCE:g} of their norm",
        _rounded(ratios),
    )


def _of_policies(folder: Path) -> Results:
    """One pass of packed policies with one layer, by number of context-parallel ranks and chunk."""
    size = Size(hidden=896, ffn=896, layers=1, heads=14, groups=2, vocab=151936)
    path = write_checkpoint(folder / "one layer", size)
    return {
        (name, chunk): [run_fresh(POLICY, path, str(chunk), ranks)]
        for name, ranks in (("packed", "1"), ("packed, CP 2", "2"))
        for _, chunk in (FEW, MANY)
    }


def over_product(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of a pass relative to the matrix product of the logits, for the slower chunk
    size.

    RuntimeError if a pass with gradients takes too large a share of one by plain chunks.
    """
    results = _alternate([LOGITS, FEW, MANY, TRAINING, TRAINING_PLAIN], repetitions, PLAIN)
    seconds = _seconds(results)
    ratios = {
        run: ratio_of_minima(seconds[_name(run)], seconds[_name(over)])
        for run, over in [
            (FEW, LOGITS),
            (MANY, LOGITS),
            (PLAIN, LOGITS),
            (TRAINING, TRAINING_PLAIN),
        ]
    }
    if ratios[TRAINING] > MOST_TRAINING:
        raise RuntimeError(f"training takes {ratios[TRAINING]:.2f} of the time of plain chunks")
    for run, over in [(FEW, PLAIN), (MANY, PLAIN), (TRAINING, TRAINING_PLAIN)]:
        _compare(results, run, over)
    return Measurement(
        max(ratios[FEW], ratios[MANY]),
        seconds,
        f"log-probabilities and gradients equal those of plain chunks within {TOLERANCE:g} of "
        "their norm",
        _rounded(ratios),
    )


def _alternate(runs: Sequence[Run], repetitions: int, once: Run) -> Results:
    """Results of each program, run alternately, and of one that runs once."""
    results: Results = {run: [] for run in [*runs, once]}
    for program, chunk in [*runs * repetitions, once]:
        results[program, chunk].append(run_fresh(PROGRAMS, program, str(chunk)))
    return results


def _seconds(results: Results) -> dict[str, tuple[float, ...]]:
    return {_name(run): tuple(r["cpu_s"] for r in found) for run, found in results.items()}


def _rounded(ratios: dict[Run, float]) -> dict[str, float]:
    return {_name(run): round(ratio, 4) for run, ratio in ratios.items()}


def _name(run: Run) -> str:
    program, chunk = run
    return f"{program}, chunks of {chunk}" if chunk else program


def _compare(results: Results, run: Run, expected: Run) -> None:
    """RuntimeError unless every result of every run is close to that of the other program."""
    theirs = results[expected][0]["samples"]
    for result in results[run]:
        for name, ours in result["samples"].items():
            distance = math.dist(ours, theirs[name]) / math.hypot(*theirs[name])
            if not distance <= TOLERANCE:
                raise RuntimeError(f"{name} of {_name(run)} are {distance:.1e} off")
