"""What verl calls on a checkpoint engine, and where it finds one by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class CheckpointEngine(ABC):
    """Methods of this list are called in this order, on both sides, for each update."""

    @abstractmethod
    def prepare(self) -> Any: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Any): ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any): ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None): ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None): ...

    @abstractmethod
    def finalize(self): ...


class CheckpointEngineRegistry:
    """Classes by the names of their backends."""

    _registry: ClassVar[dict[str, type[CheckpointEngine]]] = {}

    def register(backend: str):
        def remember(cls):
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return remember

    @classmethod
    def get(cls, backend: str):
        return cls._registry[backend]

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any):
        return cls.get(backend)(*args, **kwargs)
