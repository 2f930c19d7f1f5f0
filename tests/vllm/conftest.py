"""Engines of vLLM's CPU build, started once for each checkpoint and its options."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import EngineProcess, find_python
from tests.vllm.forks import EngineForks

KEPT = 3
"""Engines that are kept at once: each takes more than half a GiB."""
MISSING = "needs vLLM's CPU build: `make vllm-env`, or VLLM_PYTHON=/its/python"


@pytest.fixture(scope="session")
def engine() -> Iterator[Callable[..., str]]:
    """`engine(path, **options)`: the address of an engine with that checkpoint, for
    `EngineCaller`; its weights are those of whoever used it last.
    """
    if find_python() is None:
        pytest.skip(MISSING)
    running: dict[str, EngineProcess] = {}
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:

        def start(path: Path, **options: Any) -> str:
            key = repr((path, sorted(options.items())))
            process = running.pop(key, None)
            while process is None and len(running) >= KEPT:
                running.pop(next(iter(running))).close()  # the one that was asked for longest ago
            if process is None:
                own = Path(tempfile.mkdtemp(dir=folder))
                process = EngineProcess(path, own, **options)
            running[key] = process
            return process.address

        yield start
        for process in running.values():
            process.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[str]:
    """The address of a process that forks engines, for `ForkedEngine`."""
    if (python := find_python()) is None:
        pytest.skip(MISSING)
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        process = EngineForks(python, Path(folder))
        yield process.address
        process.close()
