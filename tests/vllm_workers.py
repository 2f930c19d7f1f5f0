"""Workers with vLLM's extension, and what calls them: an engine's own refits, without vLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

from megatron_policy.inference.vllm.worker import RefitExtension
from tests.refit_engine import Bits, SmallEngine, bits


class Reload:
    """In place of `ModelReload`: the model is a `SmallEngine`."""

    def __init__(self, model: SmallEngine, vllm_config: Any, *, keeps_tensors: bool) -> None:
        self.load = model.load

    def begin(self) -> None:
        """Nothing is to be prepared, and neither to be finished nor closed."""

    finish = close = begin


class Worker(RefitExtension):
    """A worker that serves these weights."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.engine = SmallEngine(weights)
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.engine, reset_lora_state=lambda: None
        )
        self.vllm_config = None


class StubLLM:
    """Calls each of some workers in turn, as `LLM.collective_rpc` does; `between` is called before
    all but the first.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.between: Callable[[str], object] = lambda method: None
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False))

    @property
    def served(self) -> list[Bits]:
        """The weights of each worker."""
        return [bits(worker.engine.weights) for worker in self.workers]

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        answers = []
        for number, each in enumerate(self.workers):
            if number:
                self.between(method)
            answers.append(getattr(each, method)(*args, **(kwargs or {})))
        return answers

    def reset_prefix_cache(self, **options: Any) -> None:
        """Nothing is cached."""


class BusyLLM:
    """In place of an `AsyncLLM` that answers requests without end: one thread computes its steps
    and does what workers are called for, one after the other, as vLLM's core does.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        self.drawn: list[set[float]] = []
        """The values that weights have had in each step: every weight has that of its version."""
        self.paused_at: list[int] = []
        """How many steps there were at each pause."""
        self._paused = self._ended = False
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            try:
                call, done = self._calls.get(timeout=0.001)
            except Empty:
                if not self._paused:
                    served = (worker.engine.weights.values() for worker in self.workers)
                    self.drawn.append({float(t.view(-1)[-1]) for of in served for t in of})
                continue
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

    async def _do(self, call: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._calls.put((call, done))
        return await asyncio.wrap_future(done)

    async def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        def call() -> list[Any]:
            return [getattr(each, method)(*args, **(kwargs or {})) for each in self.workers]

        answers: list[Any] = await self._do(call)
        return answers

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        await self._do(lambda: self._pause(True))
        self.paused_at.append(len(self.drawn))

    async def resume_generation(self) -> None:
        await self._do(lambda: self._pause(False))

    def _pause(self, paused: bool) -> None:
        self._paused = paused

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._thread.join()
