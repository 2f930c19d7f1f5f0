"""Names what the interface has and this package has not yet; knows nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

PROFILING = "profiler ranges"

Class = TypeVar("Class", bound=type)


def refuses(methods: dict[str, str]) -> Callable[[Class], Class]:
    """A class decorator: each of these methods refuses by name and says what will bring it."""

    def add(cls: Class) -> Class:
        for name, brings in methods.items():
            setattr(cls, name, _refusing(name, brings))
        return cls

    return add


def _refusing(name: str, brings: str) -> Callable[..., NoReturn]:
    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not available yet: it comes with {brings}.")

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"Not available yet: it comes with {brings}."
    return method
