"""A vLLM in a process of its own, in its own environment: `EngineProcess` starts and calls it.

`python -m megatron_policy.inference.vllm.process` is that process. Requests and answers are lines
of JSON on its standard input and output; it ends when its input does.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from megatron_policy.errors import ConfigError, WorkerError
from megatron_policy.inference.vllm.engine import EXTENSION, VllmEngine
from megatron_policy.inference.vllm.worker import make_plain

DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of the engine's environment, where the caller's has nothing else."""

FILTERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What changes the probabilities that vLLM samples by."""
LEAVING_S = 10.0

Completion = tuple[list[int], list[float]]
"""Tokens that were sampled after a prompt, and the engine's log-probability of each."""


class EngineProcess:
    """An engine in another process; one call at a time. Use it as a context manager."""

    def __init__(
        self,
        model: str | Path,
        python: str | Path,
        log: Path,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        """Start vLLM with the checkpoint `model` by the interpreter `python` of its environment,
        which need not have this package; `log` gets what it prints. `options` are those of vLLM's
        `LLM`, as far as JSON has them. No answer takes longer than `timeout_s` seconds.

        ConfigError, with vLLM's words, if it refuses the model or the options; WorkerError if the
        process ends before it can say why.
        """
        self._timeout_s, self._log = timeout_s, log
        # This package alone: what stands beside it belongs to another environment.
        self._folder = tempfile.TemporaryDirectory(prefix="engine-")
        package = Path(__file__).resolve().parents[2]
        (Path(self._folder.name) / package.name).symlink_to(package)
        alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # it starts in half the time
        workers = options.get("tensor_parallel_size", 1)
        environment = DEFAULTS | (alone if workers == 1 else {}) | os.environ
        self._waiting = False  # for the answer to a call
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    [python, "-m", __name__],
                    env=environment | {"PYTHONPATH": self._folder.name},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                )
            except OSError as error:
                raise ConfigError(f"{python} is no interpreter that this user can run") from error
        try:
            self.call("start", model=str(model), options=options)
        except BaseException as error:
            has_answered = not self._waiting and self._process.poll() is None
            self.close()
            if isinstance(error, WorkerError) and has_answered:
                raise ConfigError(f"vLLM cannot run {model}: {error}") from error
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def prepare(
        self, info: Mapping[str, Sequence[Any]], timeout_s: float = 120.0, staged: bool = False
    ) -> None:
        """See `VllmEngine.prepare`."""
        self.call("prepare", info=make_plain(info), timeout_s=timeout_s, staged=staged)

    def sample(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Completion]:
        """One completion of each prompt; `sampling` are fields of vLLM's `SamplingParams`."""
        found = self.call("sample", prompts=[list(each) for each in prompts], sampling=sampling)
        return [(tokens, logprobs) for tokens, logprobs in found]

    def describe(self, text: str | None = None) -> dict[str, Any]:
        """vLLM's `version`, the `defaults` of `FILTERS` that it has from the model's files, and
        the `text_ids` that its tokenizer makes of a text (None for None).
        """
        described: dict[str, Any] = self.call("describe", text=text)
        return described

    def call(self, method: str, **arguments: Any) -> Any:
        """The result of a method of `VllmEngine`; WorkerError with the reason if it failed."""
        self.begin(method, **arguments)
        return self.result()

    def begin(self, method: str, **arguments: Any) -> None:
        """Start a call, such as a refit that the trainer is about to send; `result` must follow,
        also if the trainer's side fails.
        """
        assert self._process.stdin is not None and not self._waiting, "a call is under way"
        line = json.dumps({"method": method, "arguments": arguments})
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._epitaph()) from None
        self._waiting = True

    def result(self) -> Any:
        """The result of the call that was begun; WorkerError with the reason if it failed. An
        engine that is late is ended: its answer would be taken for that to the next call.
        """
        output = self._process.stdout
        assert output is not None and self._waiting, "no call is under way"
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            if not selector.select(self._timeout_s):
                self._process.kill()
                raise WorkerError(
                    f"the engine has not answered within {self._timeout_s:g} s, and was ended"
                )
        self._waiting = False
        line = output.readline()
        if not line:
            raise WorkerError(self._epitaph())
        answer = json.loads(line)
        if "failed" in answer:
            raise WorkerError(answer["failed"])
        return answer["value"]

    def close(self) -> None:
        """Let the process end, and kill it if it does not."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was written to a process that has died
                pipe.close()
        try:
            self._process.wait(LEAVING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _epitaph(self) -> str:
        code = self._process.wait(self._timeout_s)
        said = self._log.read_text(errors="replace").strip().splitlines()
        last = f"; its last words: {said[-1]}" if said else ""
        return f"the engine's process has ended with code {code}{last}"


class _Served:
    """What the process does for its caller, by name."""

    def __init__(self) -> None:
        self._engine: VllmEngine | None = None

    def answer(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call the method."""
        if method == "start":
            from vllm import LLM

            model, options = arguments["model"], arguments["options"]
            self._engine = VllmEngine(LLM(model, worker_extension_cls=EXTENSION, **options))
            return None
        assert self._engine is not None, "the first call is start"
        if method == "prepare":
            tensors = arguments.pop("info")
            return self._engine.prepare(tensors, **arguments)
        if method == "sample":
            return self._sample(**arguments)
        if method == "describe":
            return self._describe(**arguments)
        return getattr(self._engine, method)(**arguments)

    def _sample(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[Completion]:
        assert self._engine is not None
        return [
            (
                list(output.token_ids),
                [
                    found[token].logprob
                    for token, found in zip(output.token_ids, output.logprobs, strict=True)
                ],
            )
            for output in self._engine.generate(prompts, **sampling)
        ]

    def _describe(self, text: str | None) -> dict[str, Any]:
        import vllm

        assert self._engine is not None
        llm, neutral = self._engine.llm, vllm.SamplingParams()
        defaults = llm.get_default_sampling_params()
        return {
            "version": vllm.__version__,
            "defaults": {
                name: getattr(defaults, name)
                for name in FILTERS
                if getattr(defaults, name) != getattr(neutral, name)
            },
            "text_ids": None if text is None else llm.get_tokenizer().encode(text),
        }


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    served = _Served()
    for line in requests:
        try:
            answer = {"value": served.answer(**json.loads(line))}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # What vLLM prints goes where its messages go.
    with os.fdopen(os.dup(1), "w") as own_output:
        os.dup2(2, 1)
        serve(sys.stdin, own_output)
