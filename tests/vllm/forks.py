"""Starts the process that forks engines, and asks it for them; see `fork_process`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.vllm.engines import (
    CHECKOUT,
    ENVIRONMENT,
    EngineCaller,
    EngineError,
    wait_until_it_listens,
)


class ForkedEngine(EngineCaller):
    """An engine of its own for one caller; it ends when the caller leaves."""

    def __init__(self, address: str, path: Path, **options: Any) -> None:
        """`address` is an `EngineForks`'. EngineError if it does not start, with vLLM's message."""
        super().__init__(address)
        self._line.send((str(path), options))
        try:
            self.result()
        except EngineError:
            self._line.close()
            raise


class EngineForks:
    """A process of vLLM's environment that has imported vLLM; it ends in `close`, or with this one.
    Engines that it has forked go on until their callers leave.
    """

    def __init__(self, python: Path, folder: Path) -> None:
        """`folder`, a short path, gets its socket and its output."""
        self.address, self._log = str(folder / "forks.sock"), folder / "forks.log"
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(CHECKOUT)}
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [python, "-m", "tests.vllm.fork_process", self.address],
                env=environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                cwd=CHECKOUT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        wait_until_it_listens(self, self._log)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
