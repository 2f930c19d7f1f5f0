"""Workers with vLLM's extension, and what calls them: an engine's own refits, without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
