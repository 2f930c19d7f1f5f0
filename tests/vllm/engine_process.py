"""A process of vLLM's environment: an engine, whose methods are called through a socket."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from multiprocessing.connection import Connection, Listener
from typing import Any

from megatron_policy.inference.vllm.engine import EXTENSION, VllmEngine


class Engine(VllmEngine):
    """What tests ask besides."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        plain = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 8,
            "max_model_len": 64,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "worker_extension_cls": EXTENSION,
        }
        super().__init__(LLM(path, **plain | options))

    def sample(self, prompts: list[list[int]], count: int, **sampling: Any) -> list[Any]:
        """`count` tokens after each prompt, with the engine's own log-probability of each."""
        done = self.generate(prompts, max_tokens=count, min_tokens=count, **sampling)
        return [
            (
                list(output.token_ids),
                [
                    found[token].logprob
                    for token, found in zip(output.token_ids, output.logprobs, strict=True)
                ],
            )
            for output in done
        ]

    def modules(self) -> list[str]:
        """Top-level names of all modules that this process has imported."""
        return sorted({name.partition(".")[0] for name in sys.modules})


def serve(engine: Engine, listener: Listener) -> None:
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
    """End this process when the one that started it closes its standard input, or dies."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_owner, daemon=True).start()
    path, address, options = sys.argv[1:]
    made = Engine(path, json.loads(options))
    with Listener(address, "AF_UNIX") as ready:
        print("ready", flush=True)
        serve(made, ready)
