"""Runs the scorecard: `python benchmarks/run.py [--rows 1 3] [--repetitions 5] [--results FILE]`;
with `--gpu` the one of GPUs.

What the rows measure is in scorecard.py and gpu_rows.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# A script's own folder is on the path, the project's is not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_rows import FULL, TOY, GpuBench
from benchmarks.results import Row, device_versions, line_of, summary, versions
from benchmarks.scorecard import SCORECARD, chosen
from megatron_policy.device import accelerators

RESULTS = Path(__file__).resolve().parent / "results.jsonl"
GPU_RESULTS = RESULTS.with_name("results-gpu.jsonl")
NO_GPU = (
    "no GPU is visible, so nothing is measured. Run this on a machine with one and a CUDA build of "
    "torch (and look at CUDA_VISIBLE_DEVICES), or add --toy to try the rows on the CPU"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what `arguments` (by default the command line) ask for."""
    options = _options(arguments)
    scorecard, made_with = SCORECARD, versions()
    if options.gpu:
        if not options.toy and not accelerators():
            print(NO_GPU, file=sys.stderr)
            raise SystemExit(2)
        bench = GpuBench(TOY if options.toy else FULL)
        scorecard, made_with = bench.scorecard, device_versions(bench.device)
        made_with["sizes"] = "toy" if options.toy else "full"
        print(*(f"{name} {value}" for name, value in made_with.items()), sep=", ", flush=True)
    rows = chosen(scorecard, options.rows)
    with (
        tempfile.TemporaryDirectory(prefix="megatron-policy-bench-") as folder,
        options.results.open("w", encoding="utf-8") as file,
    ):
        for row in rows:
            line = _measured_line(row, Path(folder), options.repetitions, made_with)
            file.write(line + "\n")
            file.flush()
            print(summary(line), flush=True)
    print(f"written to {options.results}")


def _measured_line(row: Row, folder: Path, repetitions: int, made_with: Mapping[str, str]) -> str:
    if row.measure is None:
        return line_of(row)
    measurement = row.measure(folder, repetitions)
    return line_of(row, measurement, os.getloadavg()[0], made_with)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of the rows; all by default")
    parser.add_argument("--repetitions", type=_three_or_more, default=3, help="at least 3")
    parser.add_argument("--results", type=Path, help="overwritten")
    parser.add_argument("--gpu", action="store_true", help="the rows of GPUs, on those visible")
    parser.add_argument(
        "--toy", action="store_true", help="with --gpu: tiny, on the CPU, to try the code"
    )
    options = parser.parse_args(arguments)
    if options.toy and not options.gpu:
        parser.error("--toy is for the rows of GPUs: add --gpu")
    options.results = options.results or (GPU_RESULTS if options.gpu else RESULTS)
    return options


def _three_or_more(text: str) -> int:
    number = int(text)
    if number < 3:
        raise argparse.ArgumentTypeError("at least 3, as the machine may be shared")
    return number


if __name__ == "__main__":
    main()
