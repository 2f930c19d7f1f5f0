"""Scorecard rows 30 and 31: planning a refit from shards to shards, and what engines receive."""

from __future__ import annotations

from pathlib import Path

from benchmarks.processes import run_fresh
from benchmarks.results import Measurement

MOST_BYTES = 2 * 2**30


def seconds_to_plan(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of the plan; RuntimeError if it takes more than 2 GiB."""
    runs = [run_fresh("benchmarks.shards_once") for _ in range(repetitions)]
    held = max(run["held_bytes"] for run in runs)
    if held > MOST_BYTES:
        raise RuntimeError(f"the plan takes {held} bytes of memory, {MOST_BYTES} are allowed")
    seconds = tuple(run["cpu_s"] for run in runs)
    beside = {name: runs[0][name] for name in ("parameters", "transfers")}
    beside["GiB of memory"] = round(held / 2**30, 3)
    return Measurement(min(seconds), {"plan": seconds}, "counted in row 31", beside)


def received_over_own(folder: Path, repetitions: int) -> Measurement:
    """Bytes that an engine rank receives over those that it holds, the most of all; no timing."""
    run = run_fresh("benchmarks.shards_once")
    return Measurement(run["received_over_own"], {}, "counted in the plan")
