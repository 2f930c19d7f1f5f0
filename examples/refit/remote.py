"""Starts the engine's process and calls it, without blocking if the caller has other work."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import megatron_policy

SCRIPT = Path(__file__).resolve().parent / "engine.py"
CHECKOUT = Path(megatron_policy.__file__).resolve().parents[1]


class EngineError(RuntimeError):
    """The engine raised, died, or did not answer in time."""


class RemoteEngine:
    """An engine in another process; one call at a time."""

    def __init__(self, path: str, timeout_s: float = 120.0) -> None:
        """Start it with the checkpoint at `path`. No answer takes longer than twice `timeout_s`."""
        self._timeout_s = timeout_s
        self._pipe, theirs = Pipe()
        environment = os.environ | {"PYTHONPATH": _with(CHECKOUT, os.environ.get("PYTHONPATH"))}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(theirs.fileno()), path, str(timeout_s)],
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        self.result()

    def begin(self, method: str, *arguments: Any) -> None:
        """Start a call of that method; `result` must follow."""
        self._pipe.send((method, arguments))

    def result(self) -> Any:
        """The result of the method that was begun; EngineError with the reason if it failed."""
        # A refit can take its timeout on both sides; the engine knows best why it did.
        if not self._pipe.poll(2 * self._timeout_s):
            raise EngineError(f"the engine has not answered within {2 * self._timeout_s:g} s")
        try:
            fine, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise EngineError(f"the engine died, status {self._process.wait()}") from None
        if not fine:
            raise EngineError(value)
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        """Call `begin` and `result`."""
        self.begin(method, *arguments)
        return self.result()

    def close(self) -> None:
        """Let the process end, and kill it if it does not."""
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _with(folder: Path, paths: str | None) -> str:
    return os.pathsep.join([str(folder), *filter(None, [paths])])
