"""A process of vLLM's environment: an engine, whose methods are called through a socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Listener
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

    def renew_experts(self, renews: bool) -> None:
        """Whether a refit makes the kernels of experts anew, as it does, or leaves them as they
        are, as vLLM's own reload does.
        """
        from megatron_policy.inference.vllm import reload

        plain = vars(self).setdefault("_find_packing_methods", reload._find_packing_methods)
        reload._find_packing_methods = plain if renews else lambda model: iter(())

    def damage(self, where: tuple[str, int, int, float]) -> None:
        """Add to one element of a parameter of the only worker."""
        name, row, column, by = where

        def change(model: Any) -> None:
            layer = model.get_submodule(name.removesuffix(".weight"))
            layer.weight.data[row, column] += by
            layer.quant_method.process_weights_after_loading(layer)

        self.llm.apply_model(change)

    def modules(self) -> list[str]:
        """Top-level names of all modules that this process has imported."""
        return sorted({name.partition(".")[0] for name in sys.modules})


def serve(engine: Engine, listener: Listener) -> None:
    """Call the methods that callers name, one caller after another."""
    while True:
        with listener.accept() as caller, contextlib.suppress(EOFError):
            while True:
                method, arguments, keywords = caller.recv()
                try:
                    answer = (True, getattr(engine, method)(*arguments, **keywords))
                except Exception as error:
                    traceback.print_exc()
                    answer = (False, f"{type(error).__name__}: {error}")
                caller.send(answer)


def end_with_owner() -> None:
    """End this process when the one that started it closes its standard input, or dies."""
    sys.stdin.buffer.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)  # vLLM's own processes too


if __name__ == "__main__":
    os.setsid()
    threading.Thread(target=end_with_owner, daemon=True).start()
    path, address, options = sys.argv[1:]
    made = Engine(path, json.loads(options))
    with Listener(address, "AF_UNIX") as ready:
        print("ready", flush=True)
        serve(made, ready)
