"""An engine's process: what a caller hears of one that cannot start, refuses, dies or is slow."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_policy.errors import ConfigError, WorkerError
from megatron_policy.inference.vllm.process import EngineProcess

VLLM = """
import os, sys, time
class SamplingParams:
    def __init__(self, **fields):
        self.fields = fields
class LLM:
    def __init__(self, model, worker_extension_cls, **options):
        print("a line of vLLM's on standard output")
        if options.get("refuse"):
            raise ValueError("no such kernel")
        self.model, self.options = model, options
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if method == "refit_prepare":
            raise RuntimeError(f"prepared {sorted(args[0].items())}")
        time.sleep(60)
    def reset_prefix_cache(self, **options):
        pass
"""
"""As much of vLLM as a caller's errors need; what it computes is tested with the real one."""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This interpreter, with that module in its path."""
    (tmp_path / "vllm.py").write_text(VLLM)
    script = tmp_path / "python"
    start = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import runpy; sys.argv[:] = sys.argv[1:]"
    )
    script.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -c "{start}; '
        'runpy.run_module(sys.argv[0], run_name=\'__main__\')" "$@"\n'
    )
    script.chmod(0o755)
    yield script


def test_an_environment_without_vllm_is_said_with_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot run model: ModuleNotFoundError: .*'vllm'"):
        EngineProcess("model", sys.executable, tmp_path / "log")


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere/python is no interpreter"):
        EngineProcess("model", tmp_path / "nowhere" / "python", tmp_path / "log")


def test_what_vllm_refuses_is_said_in_its_words(python: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot run model: ValueError: no such kernel"):
        EngineProcess("model", python, tmp_path / "log", refuse=True)


def test_an_engine_answers_after_a_failed_call_and_a_dead_one_ends_the_wait(
    python: Path, tmp_path: Path
) -> None:
    with EngineProcess("model", python, tmp_path / "log") as engine:
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"RuntimeError: prepared .*'w', \(\[2\], 'bf"):
                engine.call("prepare", info={"w": ([2], "bf")})
        assert "a line of vLLM's" in (tmp_path / "log").read_text()
        engine.begin("state")
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="has ended with code -9"):
            engine.result()
        with pytest.raises(WorkerError, match="has ended with code -9"):
            engine.call("state")


def test_an_engine_that_does_not_answer_in_time_is_ended(python: Path, tmp_path: Path) -> None:
    with EngineProcess("model", python, tmp_path / "log") as engine:
        engine._timeout_s = 0.2  # its start takes seconds
        with pytest.raises(WorkerError, match=r"not answered within 0\.2 s, and was ended"):
            engine.call("state")
        with pytest.raises(AssertionError, match="a call is under way"):
            engine.call("state")
