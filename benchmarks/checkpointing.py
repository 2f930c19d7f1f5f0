"""Training checkpoints: time relative to plain writing and reading of the same bytes, and how long
a background save blocks (row 12).

Runs the programs of checkpoint_once.py, each in a new process.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from benchmarks.checkpoints import Size, write_checkpoint
from benchmarks.processes import run_fresh
from benchmarks.results import Measurement, ratio_of_minima

PROGRAMS = "benchmarks.checkpoint_once"
TURNS = 4
"""Of each program per repetition: disks vary more than processors."""
# 0.18 billion parameters: 2.5 GB with fp32 main parameters and moments.
SIZE = Size(hidden=896, ffn=4864, layers=8, heads=14, groups=2, vocab=65536)
MOST_BLOCKED = 0.1
"""As a share of a blocking save: a background save that blocks for longer is an error."""
PAIRS = {"save": "write", "load, warm": "read, warm", "load, cold": "read, cold"}


def over_plain_files(folder: Path, repetitions: int) -> Measurement:
    """Wall seconds of saves and loads relative to plain files of the same bytes; the worst ratio.

    RuntimeError if a load does not restore every bit, or a background save blocks for too long.
    """
    path = write_checkpoint(folder / "0.18B", SIZE)
    box = folder / "checkpoints"
    box.mkdir()
    turns = str(TURNS * repetitions)
    blocking = run_fresh(PROGRAMS, "sync", path, box, turns)
    background = run_fresh(PROGRAMS, "background", path, box, turns)
    seconds = {n: tuple(s) for r in (blocking, background) for n, s in r["wall_s"].items()}
    ratios = {ours: ratio_of_minima(seconds[ours], seconds[floor]) for ours, floor in PAIRS.items()}
    beside = {name: round(ratio, 3) for name, ratio in ratios.items()}
    for ours, floor in PAIRS.items():
        medians = median(seconds[ours]) / median(seconds[floor])
        beside[f"{ours}, medians"] = round(medians, 3)
    for which in ("the first", "a later one"):
        blocked = min(seconds[f"blocked by {which}"]) / min(seconds["save"])
        beside[f"blocked by {which} in the background / a save"] = round(blocked, 3)
        if blocked > MOST_BLOCKED:
            raise RuntimeError(f"a save in the background blocks for {blocked:.2f} of a save")
    if blocking["plain_bytes"] < 0.999 * blocking["bytes"]:
        raise RuntimeError("the plain files are not of the same bytes")
    verified = (
        f"every load brought back all bits of {blocking['tensors']} tensors, "
        f"{blocking['bytes']} bytes of files; these are wall seconds"
    )
    return Measurement(max(ratios.values()), seconds, verified, beside)
