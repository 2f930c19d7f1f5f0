"""What keeps these tests quick: none imports a slow framework, and none starts a process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

SLOW = ("transformers", "megatron", "ray", "peft")
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec")

_started: list[str] = []


def _record(event: str, arguments: tuple[object, ...]) -> None:
    if event in STARTS:
        _started.append(event)


sys.addaudithook(_record)


class _Refuse(MetaPathFinder):
    """Keeps `SLOW` from being imported. What the process has imported before goes unnoticed: in
    `make check`, that is nothing.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in SLOW:
            raise AssertionError(f"move this test to tests/unit: it imports {name}")


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that imports or starts something slow fails: it belongs in `tests/unit`."""
    _started.clear()
    start = BaseProcess.start

    def recorded(process: Any) -> None:
        _started.append("multiprocessing.Process")
        start(process)

    monkeypatch.setattr(BaseProcess, "start", recorded)
    monkeypatch.setattr(sys, "meta_path", [_Refuse(), *sys.meta_path])
    yield
    assert not _started, f"move this test to tests/unit: it starts {', '.join(_started)}"
