"""Formats one measured row as a line of JSON, and as a readable line."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

CPU, DEVICE = "cpu_s", "device_s"


@dataclass(frozen=True)
class Measurement:
    """What a row measured: its `ratio`, and the seconds of every run of each program, in order: of
    the CPU or, by `clock`, until the device is done.

    `verified` says what was compared, in these same runs, to check that the same work was done;
    `beside` has the ratios of other methods, by name.
    """

    ratio: float
    runs: Mapping[str, tuple[float, ...]]
    verified: str
    beside: Mapping[str, float] = field(default_factory=dict)
    clock: str = CPU

    @property
    def typical(self) -> dict[str, float]:
        """Seconds of each program: the least of the CPU, to which other load only adds; the median
        of a device, which the row has to itself.
        """
        of = statistics.median if self.clock == DEVICE else min
        return {name: round(of(seconds), 6) for name, seconds in self.runs.items()}


Measure = Callable[[Path, int], Measurement]
"""Takes a working folder and a number of repetitions."""

LOWER, HIGHER = "lower", "higher"


@dataclass(frozen=True)
class Row:
    """A ratio with its `limit` and our `goal`; `skipped` says why a row has no `measure`."""

    number: int
    what: str
    limit: float
    goal: float
    better: str = LOWER
    measure: Measure | None = None
    skipped: str = ""


def ratio_of_minima(numerator: tuple[float, ...], denominator: tuple[float, ...]) -> float:
    """The minimum of one over the minimum of the other: other load on the machine only
    adds time.
    """
    return min(numerator) / min(denominator)


def line_of(
    row: Row,
    measurement: Measurement | None = None,
    load_average: float | None = None,
    made_with: Mapping[str, str] | None = None,
) -> str:
    """The row's line in the results; without a measurement it says why there is none."""
    fields: dict[str, Any] = {"row": row.number, "what": row.what, "ratio": None}
    fields |= {"limit": row.limit, "goal": row.goal, "better": row.better}
    if measurement is None:
        assert row.skipped, f"row {row.number} has neither a measurement nor a reason"
        return json.dumps(fields | {"cpu_s": None, "load_average": None, "skipped": row.skipped})
    digits = 6 if measurement.clock == DEVICE else 4
    runs = {name: [round(s, digits) for s in seconds] for name, seconds in measurement.runs.items()}
    fields["ratio"] = round(measurement.ratio, 4)
    fields["met"] = meets(row, measurement.ratio)
    fields[measurement.clock] = {n: round(s, digits) for n, s in measurement.typical.items()}
    fields["load_average"] = None if load_average is None else round(load_average, 2)
    fields |= {"runs": runs, "verified": measurement.verified}
    if measurement.beside:
        fields["beside"] = dict(measurement.beside)
    return json.dumps(fields | {"made_with": dict(made_with or {})})


def meets(row: Row, ratio: float) -> bool:
    """Whether a ratio meets the row's goal."""
    return ratio <= row.goal if row.better == "lower" else ratio >= row.goal


def summary(line: str) -> str:
    """A line of the results in readable form."""
    row = json.loads(line)
    head = f"{row['row']:>2}  {row['what']}"
    if row["ratio"] is None:
        return f"{head}: skipped, {row['skipped']}"
    load = row["load_average"]
    sign = "<=" if row["better"] == "lower" else ">="
    clock = DEVICE if DEVICE in row else CPU
    seconds = ", ".join(f"{name} {value:.4g}" for name, value in row[clock].items())
    others = "".join(f"; {name} {value:g}" for name, value in row.get("beside", {}).items())
    return (
        f"{head}: {row['ratio']:.3f} (goal {sign} {row['goal']:g}, limit {row['limit']:g}) "
        f"{'met' if row['met'] else 'MISSED'}; {clock[:-2]} s: {seconds}; load {load}"
        f"{others}"
    )


def versions() -> dict[str, str]:
    """The versions the measurement was made with."""
    found = {name: metadata.version(name) for name in ("torch", "megatron-core", "transformers")}
    return {"python": platform.python_version(), **found}


def device_versions(device: Mapping[str, Any]) -> dict[str, str]:
    """The same with the device's name and rates, as device_once.py prints them, and the versions of
    what computes on GPUs if installed.
    """
    found = {
        "device": device["device"],
        "devices": str(device["devices"]),
        "product_tflops": f"{device['product_flops'] / 1e12:.4g}",
        "copy_gb_per_second": f"{device['memory_bandwidth'] / 1e9:.4g}",
    }
    for name, rate in device["host_bytes_per_second"].items():
        found[f"copy {name}, GB/s"] = f"{rate / 1e9:.4g}"
    found |= {**versions(), "cuda": str(torch.version.cuda)}
    for name in ("transformer-engine", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
