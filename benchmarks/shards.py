"""Scorecard rows 30 and 31: what precedes a refit of shards, and what engines receive of it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.processes import run_fresh
from benchmarks.results import Measurement

MOST_BYTES = 2 * 2**30


def seconds_before_first_byte(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of all that trainer 0 computes; RuntimeError if it takes more than 2 GiB."""
    runs = [run_fresh("benchmarks.shards_once") for _ in range(repetitions)]
    held = max(run["held_bytes"] for run in runs)
    if held > MOST_BYTES:
        raise RuntimeError(f"the plan takes {held} bytes of memory, {MOST_BYTES} are allowed")
    seconds = tuple(run["cpu_s"] for run in runs)
    beside = {name: runs[0][name] for name in ("parameters", "transfers", "told_bytes")}
    beside["GiB of memory"] = round(held / 2**30, 3)
    beside["the plan alone"] = min(run["planned_s"] for run in runs)
    verified = "what engines are told has the runs that the trainer sends; bytes as in row 31"
    return Measurement(min(seconds), {"all": seconds}, verified, beside)


def received_over_own(folder: Path, repetitions: int) -> Measurement:
    """Bytes that an engine rank receives over those that it holds, the most of all; no timing."""
    run = run_fresh("benchmarks.shards_once")
    return Measurement(run["received_over_own"], {}, "counted in the plan")
