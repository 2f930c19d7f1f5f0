"""Starts engines in vLLM's environment and calls them; see `engine_process`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
ANSWER_S = 300.0  # a busy machine takes minutes to start an engine

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

OPTIONS: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 128,
    "worker_extension_cls": "tests.vllm.extension.BreakingExtension",
}
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


def options_of(family: str, workers: int = 1) -> dict[str, Any]:
    """One engine for each family and number of workers, for all tests of refits."""
    several = {"tensor_parallel_size": workers} if workers > 1 else {}
    return OPTIONS | several | (LORA if family == "qwen2" else {})


def find_python() -> Path | None:
    """The interpreter of vLLM's environment: VLLM_PYTHON, or that of `make vllm-env`."""
    named = os.environ.get("VLLM_PYTHON")
    path = Path(named) if named else CHECKOUT / ".venv-vllm" / "bin" / "python"
    return path if path.exists() else None


class EngineError(RuntimeError):
    """The engine raised, died, or did not answer in time."""


class EngineCaller:
    """Calls an engine of another process from this one; one call at a time."""

    def __init__(self, address: str) -> None:
        """`address` is an `EngineProcess`'s."""
        self._line = Client(address, "AF_UNIX")

    def __enter__(self) -> EngineCaller:
        return self

    def __exit__(self, *raised: object) -> None:
        self._line.close()

    def begin(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Start a call of that method; `result` must follow."""
        self._line.send((method, arguments, keywords))

    def result(self) -> Any:
        """The result of the method that was begun; EngineError with the reason if it failed."""
        if not self._line.poll(ANSWER_S):
            raise EngineError(f"the engine has not answered within {ANSWER_S:g} s")
        try:
            fine, value = self._line.recv()
        except (EOFError, ConnectionError):
            raise EngineError("the engine died") from None
        if not fine:
            raise EngineError(value)
        return value

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call `begin` and `result`."""
        self.begin(method, *arguments, **keywords)
        return self.result()


class EngineProcess:
    """An engine in vLLM's environment. It ends with this process, or in `close`."""

    def __init__(
        self, path: Path, folder: Path, module: str = "engine_process", **options: Any
    ) -> None:
        """Start it with the checkpoint at `path`; `options` are those of vLLM's `LLM`, in JSON.
        `folder`, a short path, gets its socket and its output; `module`, of this package, is what
        it runs. EngineError if it does not start.
        """
        python = find_python()
        assert python is not None
        self.address, self._log = str(folder / "engine.sock"), folder / "engine.log"
        # Workers in the caller's own process start in half the time.
        alone = options.get("tensor_parallel_size", 1) == 1
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(CHECKOUT)}
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if alone else {}
        command = ["-m", f"tests.vllm.{module}", path, self.address, json.dumps(options)]
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [python, *command],
                env=environment,
                cwd=CHECKOUT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        wait_until_it_listens(self, self._log)

    def close(self) -> None:
        """Let the process end, and kill it if it does not."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_until_it_listens(started: Any, log: Path) -> None:
    """Return when something listens at the `address` of what has started a `process`. EngineError
    with the end of its output if that does not come, once it is closed.
    """
    deadline = time.monotonic() + ANSWER_S
    while not _listens(started.address):
        if started.process.poll() is not None or time.monotonic() > deadline:
            started.close()
            raise EngineError(f"the engine has not started: {log.read_text()[-3000:]}")
        time.sleep(0.1)


def _listens(address: str) -> bool:
    """Whether a process answers there: the file of a socket is there before that."""
    try:
        Client(address, "AF_UNIX").close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True
