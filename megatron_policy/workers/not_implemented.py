"""Names what an interface has and this package does not; knows nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from megatron_policy.workers.delegates import placed

Class = TypeVar("Class", bound=type)


def refuses(methods: Mapping[str, str]) -> Callable[[Class], Class]:
    """A class decorator: each of these methods refuses by name and says why it is not built."""

    def add(cls: Class) -> Class:
        for name, reason in methods.items():
            setattr(cls, name, placed(cls, name, _refusing(name, reason)))
        return cls

    return add


def _refusing(name: str, reason: str) -> Callable[..., NoReturn]:
    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not built: {reason}.")

    method.__name__ = name
    method.__doc__ = f"Not built: {reason}."
    return method
