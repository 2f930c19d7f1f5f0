"""The tests that compare numbers, under every instruction set and number of threads that a machine
has: `make sweep-cpus`. Prints how much of each tolerance was used; fails above half of one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LIMIT = 0.5
"""Of a tolerance: what the rest is for is the machine that has not been tried."""


def comparing_tests() -> list[str]:
    """All that compare by `tests.exact`, but for those that need GPUs."""
    uses = r"^from tests\.(exact|margins) import|^from tests import .*margins|oracle\.Learned"
    names = [
        file.relative_to(ROOT).as_posix()
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(uses, file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    return [
        name
        for name in names
        if not name.startswith(("tests/gpu/", "tests/hosts/real/", "tests/vllm/"))
    ]


@dataclass(frozen=True)
class InstructionSet:
    """What oneDNN, ATen and MKL are told to use, and the processor's flags that it takes."""

    flags: tuple[str, ...] = ()
    onednn: str | None = None
    aten: str | None = None
    mkl: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a process that computes with it; none for the machine's own."""
        named = {
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "ATEN_CPU_CAPABILITY": self.aten,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }
        return {name: value for name, value in named.items() if value is not None}


# Of oneDNN, ATen and MKL together: mixtures of them, which no machine has by itself, are not run.
SETS = {
    "sse41": InstructionSet((), "SSE41", "default", "SSE4_2"),
    "avx2": InstructionSet(("avx2",), "AVX2", "avx2", "AVX2"),
    "avx512": InstructionSet(("avx512f", "avx512bw"), "AVX512_CORE", "avx512", "AVX512"),
    "own": InstructionSet(),
}
DEMO_SETS = ("avx2", "own")


@dataclass(frozen=True)
class Run:
    """What a run of the tests printed: margins by quantity, and whether it passed."""

    name: str
    passed: bool
    margins: Mapping[str, float]

    @property
    def fine(self) -> bool:
        """Whether everything passed within half of every tolerance."""
        return self.passed and bool(self.margins) and max(self.margins.values()) <= LIMIT


def available() -> list[str]:
    """The names of the sets that this machine has."""
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return [name for name, isa in SETS.items() if flags.issuperset(isa.flags)]


def margins_of(printed: str) -> dict[str, float]:
    """What the summary of a test run says about each quantity; empty where there is none."""
    _, _, summary = printed.partition("largest difference over its tolerance")
    lines = re.findall(r"^ *(\d+\.\d+|nan|inf)  (.+?)  \(", summary, re.MULTILINE)
    return {quantity: float(share) for share, quantity in lines}


def environment_of(name: str, threads: int) -> dict[str, str]:
    """This process's environment without instruction sets of its own, and with those of a name."""
    chosen = {n: v for n, v in os.environ.items() if n not in SETS["sse41"].environment}
    # Threads that wait sleep: those of a dozen ranks share a few cores.
    threading = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return chosen | SETS[name].environment | threading


def run_tests(name: str, threads: int, arguments: list[str]) -> Run:
    """The tests in a process of their own, whose output is also shown."""
    title = f"{name}, {threads} thread{'s' * (threads > 1)}"
    print(f"=== {title}", flush=True)
    options = ["-q", "--no-header", "-m", ""]  # with those that are marked sweep
    command = [sys.executable, "-m", "pytest", *options, *arguments, *comparing_tests()]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of(name, threads), stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    return Run(title, done.returncode == 0, margins_of(done.stdout))


def run_demo(name: str) -> Run:
    """The demo, which compares its export with transformers by itself."""
    print(f"=== demo, {name}", flush=True)
    command = [sys.executable, "examples/quickstart/run.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment_of(name, 1))
    return Run(f"demo, {name}", done.returncode == 0, {"-": 0.0})


def main() -> int:
    """0 if every run was fine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=available(), default=available())
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--no-demo", action="store_true", help="leave out the demo")
    options, more = parser.parse_known_args()
    runs = [run_tests(name, n, more) for n in options.threads for name in options.sets]
    if not options.no_demo:
        runs += [run_demo(name) for name in DEMO_SETS if name in options.sets]
    print(table(runs))
    return 0 if all(run.fine for run in runs) else 1


def table(runs: list[Run]) -> str:
    """The share of each tolerance that each run used, one line a quantity."""
    lines = [f"{run.name}: {'fine' if run.fine else 'NOT FINE'}" for run in runs]
    names = sorted({name for run in runs for name in run.margins if name != "-"})
    columns = [run for run in runs if "-" not in run.margins]
    lines.append("".join(f"{run.name:>18}" for run in columns) + "  share of the tolerance of")
    for name in names:
        shares = (run.margins.get(name) for run in columns)
        lines.append(
            "".join(f"{'' if s is None else f'{s:.2f}':>18}" for s in shares) + f"  {name}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
