"""A process of vLLM's environment with an `AsyncLLM`, whose requests go on while it is called."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
from concurrent.futures import Future
from dataclasses import asdict
from multiprocessing.connection import Listener
from typing import Any

from megatron_policy.inference.vllm.async_engine import AsyncVllmEngine
from tests.vllm.engine_process import PLAIN, end_with_owner, serve


class InFlight:
    """Runs the engine's coroutines in a thread of their own."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._requests: list[Future[Any]] = []
        self._tokens: list[int] = []
        self._read = asyncio.Event()
        self._read.set()
        self._engine = self._run(self._start(path, options))

    async def _start(self, path: str, options: dict[str, Any]) -> AsyncVllmEngine:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(model=path, **PLAIN | options)
        return AsyncVllmEngine(AsyncLLM.from_engine_args(arguments))

    def ask(self, prompts: list[list[int]], **sampling: Any) -> None:
        """Begin a request for each prompt."""
        for prompt in prompts:
            begun = self._follow(len(self._requests), prompt, sampling)
            self._tokens.append(0)
            self._requests.append(asyncio.run_coroutine_threadsafe(begun, self._loop))

    def hold(self, held: bool) -> None:
        """Whether nobody reads what is drawn from now on."""
        self._loop.call_soon_threadsafe(self._read.clear if held else self._read.set)

    async def _follow(self, number: int, prompt: list[int], sampling: dict[str, Any]) -> Any:
        async for done in self._engine.stream(prompt, **sampling):
            self._tokens[number] = len(done.token_ids)
            await self._read.wait()
        return done

    def tokens(self) -> list[int]:
        """How many each of them has by now."""
        return list(self._tokens)

    def completions(self) -> list[dict[str, Any]]:
        """Those of all requests that were begun since the last call, when they are complete."""
        found = [asdict(request.result()) for request in self._requests]
        self._requests, self._tokens = [], []
        return found

    def under_way(self) -> int:
        """How many of them are not complete."""
        return sum(not request.done() for request in self._requests)

    def engine(self, method: str, *arguments: Any, **named: Any) -> Any:
        """What that method of the engine returns."""
        return self._run(getattr(self._engine, method)(*arguments, **named))

    def begin_engine(self, method: str, *arguments: Any) -> None:
        """Begin that method of the engine; `end_engine` follows."""
        begun = getattr(self._engine, method)(*arguments)
        self._begun = asyncio.run_coroutine_threadsafe(begun, self._loop)

    def end_engine(self) -> Any:
        """What it has returned."""
        return self._begun.result()

    def damage(self, where: tuple[str, int, int, float]) -> None:
        """Add to one element of a weight of all workers."""
        self._run(self._engine.llm.collective_rpc("refit_damage", args=(where,)))

    def __getattr__(self, method: str) -> Any:
        return functools.partial(self.engine, method)

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


if __name__ == "__main__":
    end_with_owner()
    path, address, options = sys.argv[1:]
    made = InFlight(path, json.loads(options))
    with Listener(address, "AF_UNIX") as ready:
        print("ready", flush=True)
        serve(made, ready)
