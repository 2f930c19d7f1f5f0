"""What keeps these tests quick: none imports a slow framework, and none starts a process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

SLOW = frozenset(("transformers", "megatron", "ray", "peft", "vllm", "verl", "nemo_rl"))
STARTS = frozenset(("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"))

_started: list[str] = []


def _record(event: str, arguments: tuple[object, ...]) -> None:
    if event in STARTS:
        _started.append(event)


sys.addaudithook(_record)


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that imports or starts something slow fails: it belongs in `tests/unit`."""
    _started.clear()
    start = BaseProcess.start

    def recorded(process: BaseProcess) -> None:
        _started.append("multiprocessing.Process")
        start(process)

    monkeypatch.setattr(BaseProcess, "start", recorded)
    imported = SLOW & sys.modules.keys()
    yield
    slow = [*sorted((SLOW & sys.modules.keys()) - imported), *_started]
    assert not slow, f"move this test to tests/unit: it imports or starts {', '.join(slow)}"
