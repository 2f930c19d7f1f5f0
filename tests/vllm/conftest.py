"""Engines of vLLM's CPU build, started once for each checkpoint and its options."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import EngineProcess, find_python
from tests.vllm.forks import EngineForks

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
            if key not in running:
                own = Path(folder) / str(len(running))
                own.mkdir()
                running[key] = EngineProcess(path, own, **options)
            return running[key].address

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
