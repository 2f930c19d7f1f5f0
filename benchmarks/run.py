"""Runs the scorecard: `python benchmarks/run.py [--rows 1 3] [--repetitions 5] [--results FILE]`.

What the rows measure is in scorecard.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# A script's own folder is on the path, the project's is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.results import Row, line_of, summary, versions
from benchmarks.scorecard import SCORECARD, chosen

RESULTS = Path(__file__).resolve().parent / "results.jsonl"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what `arguments` (by default the command line) ask for."""
    options = _options(arguments)
    rows = chosen(SCORECARD, options.rows)
    with (
        tempfile.TemporaryDirectory(prefix="megatron-policy-bench-") as folder,
        options.results.open("w", encoding="utf-8") as file,
    ):
        for row in rows:
            line = _measured_line(row, Path(folder), options.repetitions)
            file.write(line + "\n")
            file.flush()
            print(summary(line), flush=True)
    print(f"written to {options.results}")


def _measured_line(row: Row, folder: Path, repetitions: int) -> str:
    if row.measure is None:
        return line_of(row)
    measurement = row.measure(folder, repetitions)
    return line_of(row, measurement, os.getloadavg()[0], versions())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of the rows; all by default")
    parser.add_argument("--repetitions", type=_three_or_more, default=3, help="at least 3")
    parser.add_argument("--results", type=Path, default=RESULTS, help="overwritten")
    return parser.parse_args(arguments)


def _three_or_more(text: str) -> int:
    number = int(text)
    if number < 3:
        raise argparse.ArgumentTypeError("at least 3, as the machine may be shared")
    return number


if __name__ == "__main__":
    main()
