"""The side of an inference engine: a process that samples and says its log-probabilities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_policy.errors import ConfigError, WorkerError
from megatron_policy.inference.vllm import sample
from megatron_policy.inference.vllm.sample import JOB, REFUSED, SAMPLED

_LOG = "engine.log"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What is set unless the caller's environment has it."""


@dataclass(frozen=True)
class EngineJob:
    """What an engine samples."""

    model: str
    prompts: list[list[int]]
    tokens: int
    """The length of each row: a prompt and its continuation."""
    dtype: str
    seed: int
    text: str | None = None
    """For the engine's tokenizer; None if it has none."""


@dataclass(frozen=True)
class EngineReading:
    """What an engine has sampled, and says of it; see `inference.vllm.sample`."""

    version: str
    rows: list[list[int]]
    sampled: list[list[float]]
    scored: list[list[float]]
    defaults: dict[str, Any] = field(default_factory=dict)
    text_ids: list[int] | None = None


def read_engine(job: EngineJob, python: str | None, timeout_s: float) -> EngineReading:
    """Run the job in vLLM, in a process that frees its memory at the end: of the interpreter
    `python`, by default that of this process. ConfigError, with vLLM's own words, if it does not
    take the model.
    """
    interpreter = _find_interpreter(python)
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        folder = Path(name)
        (folder / JOB).write_text(json.dumps(job.__dict__))
        # This package alone: what stands beside it belongs to another environment.
        (folder / "megatron_policy").symlink_to(Path(__file__).resolve().parents[1])
        with (folder / _LOG).open("wb") as log:
            process = subprocess.Popen(
                [interpreter, "-m", sample.__name__, name],
                env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": name},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"vLLM has not answered within {timeout_s:g} s") from None
        finally:
            process.kill()
            process.wait()
        if (refused := folder / REFUSED).exists():
            words = json.loads(refused.read_text())
            raise ConfigError(f"vLLM cannot run {job.model}: {words}")
        if code or not (folder / SAMPLED).exists():
            said = (folder / _LOG).read_text(errors="replace").strip().splitlines()
            last = f"; its last output: {said[-1]}" if said else ""
            raise WorkerError(f"the process of vLLM exited with code {code}{last}")
        return EngineReading(**json.loads((folder / SAMPLED).read_text()))


def _find_interpreter(python: str | None) -> str:
    if python is not None:
        if not os.access(python, os.X_OK):
            raise ConfigError(f"{python} is no interpreter that this user can run")
        return python
    if find_spec("vllm") is None:
        raise ConfigError(
            "vllm is not installed in this environment: name the interpreter of the one that has "
            "it by --engine-python"
        )
    return sys.executable
