"""The measurements of a run, kept in memory and in a JSON lines file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self


class Records:
    """Measurements in order, each with the name of its phase."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records

    @classmethod
    def read(cls, path: Path) -> Self:
        """Those of an earlier run, from its file."""
        return cls([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])

    def series(self, phase: str, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric of a phase, for the steps that measured it."""
        found = [r for r in self.records if r["phase"] == phase and name in r]
        return [r["step"] for r in found], [r[name] for r in found]


class Journal(Records):
    """Records in order, each with the name of its phase; the file is complete after each record."""

    def __init__(self, path: Path) -> None:
        super().__init__([])
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def add(self, phase: str, metrics: dict[str, float]) -> None:
        """Keep and write one record."""
        record = {"phase": phase, **metrics}
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
