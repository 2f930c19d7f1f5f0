"""Every case of the suite in every environment: `make nightly`. Writes docs/nightly.md, which says
when that last ran and what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "nightly.md"
BEGIN, END = "<!-- made by `make nightly` -->", "<!-- end -->"
ENVIRONMENTS = {"pinned": ".venv", "latest": ".venv-latest", "gpu-image": ".venv-gpu-image"}
"""Their names in `make nightly NIGHTLY_ARGS=...`, and where `make` puts them."""
PACKAGES = ("torch", "megatron-core", "transformers")
COUNTS = ("passed", "failed", "skipped", "minutes", "seed")
COLUMNS = ("environment", "part", "Python", *PACKAGES, "commit", "day (UTC)", *COUNTS)
WHOLE = "1/1"


@dataclass(frozen=True)
class Outcome:
    """What one environment made of all cases."""

    passed: int
    failed: int
    skipped: int

    @classmethod
    def read(cls, file: Path) -> Outcome:
        """From the report that pytest writes with `--junitxml`."""
        suites = list(ElementTree.parse(file).getroot().iter("testsuite"))

        def total(*names: str) -> int:
            return sum(int(suite.get(name, 0)) for suite in suites for name in names)

        failed, skipped = total("failures", "errors"), total("skipped")
        return cls(total("tests") - failed - skipped, failed, skipped)


def files_of(part: str) -> list[str]:
    """The files of tests that a part such as "2/3" runs: every third one from the second."""
    number, parts = map(int, part.split("/"))
    files = (file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py"))
    return sorted(map(str, files))[number - 1 :: parts]


def run_environment(folder: str, part: str, seed: int, arguments: list[str]) -> Outcome:
    """Run all cases of a part with the Python of an environment; its output is this process's."""
    report = ROOT / "build" / f"nightly-{folder.removeprefix('.')}-{part.replace('/', '-of-')}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    environment = os.environ | {"LAYOUT_SEED": str(seed)}
    # The Triton of older releases cannot be interpreted with the newest NumPy.
    if not Path("/dev/nvidia0").exists() and folder == ENVIRONMENTS["latest"]:
        environment["TRITON_INTERPRET"] = "1"
    command = [python_of(folder), "-m", "pytest", "-m", "", f"--junitxml={report}", *arguments]
    command += [] if part == WHOLE else files_of(part)
    done = subprocess.run(command, cwd=ROOT, env=environment)
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"{folder}: pytest ended with {done.returncode}, before all cases had run")
    return Outcome.read(report)


def python_of(folder: str) -> str:
    return str(ROOT / folder / "bin" / "python")


def versions_of(folder: str) -> list[str]:
    """Of Python and `PACKAGES` in an environment."""
    code = (
        "import json, platform; from importlib.metadata import version; "
        f"print(json.dumps([platform.python_version(), *map(version, {PACKAGES})]))"
    )
    output = subprocess.run([python_of(folder), "-c", code], capture_output=True, check=True)
    versions: list[str] = json.loads(output.stdout)
    return versions


def read_commit() -> str:
    """The checkout's commit, and whether files other than the page differ from it."""

    def ask(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout

    changed = ask("status", "--porcelain", "--untracked-files=no", ".", f":(exclude){PAGE}")
    return ask("describe", "--always").strip() + ("-dirty" if changed else "")


def with_row(page: str, row: str) -> str:
    """The page with `row` in place of what it had of the same environment and part, and without
    that environment's parts of another division.
    """
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    name, part = key_of(row)
    rows = {key_of(line): line for line in table.splitlines() if line.startswith("| ")}
    kept = {
        key: line
        for key, line in rows.items()
        if key[0] in ENVIRONMENTS and (key[0] != name or key[1][-1] == part[-1])
    }
    kept[name, part] = row
    order = list(ENVIRONMENTS)
    own = [kept[key] for key in sorted(kept, key=lambda key: (order.index(key[0]), key[1]))]
    lines = [BEGIN, "", line_of(COLUMNS), line_of(["---"] * len(COLUMNS)), *own, "", END]
    return before + "\n".join(lines) + after


def key_of(row: str) -> tuple[str, str]:
    """Environment and part of a row."""
    name, part = (cell.strip() for cell in row.split("|")[1:3])
    return name, part


def line_of(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument(
        "--part", default=WHOLE, help="such as 2/3: the second third of the files of tests alone"
    )
    parser.add_argument("--seed", type=int, default=datetime.now(UTC).date().toordinal())
    parser.add_argument(
        "--pytest",
        nargs=argparse.REMAINDER,
        default=[],
        help="its arguments; the page takes all cases to have run",
    )
    parsed = parser.parse_args(arguments)
    parsed.environments = parsed.environments or list(ENVIRONMENTS)
    if unknown := {*parsed.environments} - ENVIRONMENTS.keys():
        parser.error(f"no environment {', '.join(unknown)}; there are {', '.join(ENVIRONMENTS)}")
    if not re.fullmatch(r"[1-9]/[1-9]", parsed.part) or parsed.part[0] > parsed.part[2]:
        parser.error(f"no part {parsed.part}; the second third is 2/3")
    return parsed


def main() -> int:
    arguments, commit, failed = parse(sys.argv[1:]), read_commit(), 0
    for name in arguments.environments:
        folder, begin = ENVIRONMENTS[name], time.monotonic()
        outcome = run_environment(folder, arguments.part, arguments.seed, arguments.pytest)
        minutes = f"{(time.monotonic() - begin) / 60:.0f}"
        counts = [f"{n:,}" for n in (outcome.passed, outcome.failed, outcome.skipped)]
        day = datetime.now(UTC).date().isoformat()
        told = [name, arguments.part, *versions_of(folder), commit, day, *counts, minutes]
        row = line_of([*told, arguments.seed])
        PAGE.write_text(with_row(PAGE.read_text(), row))
        print(row)
        failed += outcome.failed
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
