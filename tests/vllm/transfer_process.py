"""A process of vLLM's environment: an `LLM` whose weight transfer is called through a socket, and
the trainer's client of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

ANSWER_S = 300.0


class Served:
    """vLLM's entry points of weight transfer as it has them, and what tests ask besides."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        plain = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 8,
            "max_model_len": 64,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "weight_transfer_config": {"backend": "megatron_policy"},
        }
        self._llm = llm = LLM(path, **plain | options)
        self.start_weight_update = llm.start_weight_update
        self.finish_weight_update = llm.finish_weight_update
        self.get_weight_version = llm.get_weight_version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def use_backend(self, name: str) -> None:
        """Give the workers another engine, as if `weight_transfer_config` had named its backend."""
        self._llm.collective_rpc(_use_backend, args=(name,))

    def sample(self, prompts: list[list[int]], count: int) -> list[tuple[list[int], list[float]]]:
        """`count` tokens after each prompt, with the engine's own log-probability of each."""
        from vllm import SamplingParams

        self._llm.reset_prefix_cache()
        sampling = SamplingParams(
            max_tokens=count,
            min_tokens=count,
            temperature=1.0,
            seed=3,
            logprobs=0,
            detokenize=False,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = [each.outputs[0] for each in self._llm.generate(requests, sampling, use_tqdm=False)]
        return [
            (tokens, [at[token].logprob for token, at in zip(tokens, found, strict=True)])
            for tokens, found in ((list(each.token_ids), each.logprobs) for each in done)
        ]


def _use_backend(worker: Any, name: str) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    worker = getattr(worker, "worker", worker)  # what calls it may be a wrapper of it
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=name),
        worker.vllm_config,
        worker.device,
        worker.model_runner.get_model(),
    )


class EngineClient:
    """The trainer's client: vLLM's `VLLMWeightSyncClient`, and `call` for everything else."""

    def __init__(self, address: str) -> None:
        self._line, self._lock = Client(address, "AF_UNIX"), threading.Lock()

    def close(self) -> None:
        self._line.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """RuntimeError with the engine's reason."""
        with self._lock:
            self._line.send((method, arguments))
            if not self._line.poll(ANSWER_S):
                raise RuntimeError(f"the engine has not answered within {ANSWER_S:g} s")
            fine, value = self._line.recv()
        if not fine:
            raise RuntimeError(value)
        return value

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)


def serve(engine: Served, listener: Listener) -> None:
    """Call what callers name, one caller after another."""
    while True:
        with listener.accept() as caller, contextlib.suppress(EOFError):
            while True:
                answer(engine, caller)


def answer(engine: Served, caller: Connection) -> None:
    method, arguments = caller.recv()
    step: Callable[..., Any] = getattr(engine, method)
    try:
        caller.send((True, step(*arguments)))
    except Exception as error:
        traceback.print_exc()
        caller.send((False, f"{type(error).__name__}: {error}"))


def end_with_owner() -> None:
    """End this process when the one that started it closes its standard input, or dies."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_owner, daemon=True).start()
    path, address, options = sys.argv[1:]
    served = Served(path, json.loads(options))
    with Listener(address, "AF_UNIX") as ready:
        serve(served, ready)
