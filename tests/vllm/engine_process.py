"""A process of vLLM's environment: an engine, whose methods are called through a socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection, Listener
from typing import Any

from megatron_policy.inference.vllm.engine import EXTENSION, VllmEngine

PLAIN: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 8,
    "max_model_len": 64,
    "kv_cache_memory_bytes": 64 * 2**20,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "worker_extension_cls": EXTENSION,
}


class Engine(VllmEngine):
    """What tests ask besides."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        super().__init__(LLM(path, **PLAIN | options))
        self._forgets = True

    def sample(self, prompts: list[list[int]], count: int, **sampling: Any) -> list[Any]:
        """`count` tokens after each prompt, with the engine's own log-probability of each."""
        done = self.generate(prompts, max_tokens=count, min_tokens=count, **sampling)
        return [_read(output) for output in done]

    def forget(self, forgets: bool) -> None:
        """Whether a refit lets go of what is cached."""
        self._forgets = forgets

    def forget_cached(self) -> None:
        if self._forgets:
            super().forget_cached()

    def begin_steps(self, prompts: list[list[int]], count: int, steps: int) -> list[int]:
        """Begin to generate `count` tokens after each prompt; how many there are after so many
        steps of the engine.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=count, min_tokens=count, logprobs=0, detokenize=False)
        for number, prompt in enumerate(prompts):
            self.llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        self._stepped: dict[str, Any] = {}
        for _ in range(steps):
            self._step()
        return [len(output.token_ids) for _, output in sorted(self._stepped.items())]

    def end_steps(self) -> list[Any]:
        """The tokens of all of them, and their log-probabilities."""
        while self.llm.llm_engine.has_unfinished_requests():
            self._step()
        return [_read(output) for _, output in sorted(self._stepped.items())]

    def _step(self) -> None:
        for output in self.llm.llm_engine.step():
            self._stepped[output.request_id] = output.outputs[0]

    def workers(self, method: str, *arguments: Any) -> list[Any]:
        """What that method of the workers' extension returns."""
        return self.llm.collective_rpc(method, args=arguments)

    def renew_experts(self, renews: bool) -> None:
        """Whether a refit makes the kernels of experts anew, as it does, or leaves them as they
        are, as vLLM's own reload does.
        """
        from megatron_policy.inference.vllm import reload

        plain = vars(self).setdefault("_find_packing_methods", reload._find_packing_methods)
        reload._find_packing_methods = plain if renews else lambda model: iter(())

    def damage(self, where: tuple[str, int, int, float]) -> None:
        """Add to one element of a weight of all workers."""
        self.workers("refit_damage", where)

    def modules(self) -> list[str]:
        """Top-level names of all modules that this process has imported."""
        return sorted({name.partition(".")[0] for name in sys.modules})


def _read(output: Any) -> tuple[list[int], list[float]]:
    found = zip(output.token_ids, output.logprobs, strict=True)
    return list(output.token_ids), [logprobs[token].logprob for token, logprobs in found]


def serve(engine: Any, listener: Listener) -> None:
    """Call the methods that callers name, one caller after another."""
    while True:
        with listener.accept() as caller:
            answer(engine, caller)


def answer(engine: Engine, caller: Connection) -> None:
    """Call the methods that one caller names, until it closes the line."""
    with contextlib.suppress(EOFError):
        while True:
            method, arguments, keywords = caller.recv()
            try:
                reply = (True, getattr(engine, method)(*arguments, **keywords))
            except Exception as error:
                traceback.print_exc()
                reply = (False, f"{type(error).__name__}: {error}")
            caller.send(reply)


def end_with_owner() -> None:
    """Let this process end when the one that started it closes its standard input, or dies; vLLM's
    own processes with it, and no others: its group is its own.
    """
    os.setsid()

    def end() -> None:
        sys.stdin.buffer.read()
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


if __name__ == "__main__":
    end_with_owner()
    path, address, options = sys.argv[1:]
    made = Engine(path, json.loads(options))
    with Listener(address, "AF_UNIX") as ready:
        print("ready", flush=True)
        serve(made, ready)
