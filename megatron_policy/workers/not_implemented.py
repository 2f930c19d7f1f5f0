"""Methods that an interface has and this package does not implement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

Class = TypeVar("Class", bound=type)


def refuses(methods: Mapping[str, str]) -> Callable[[Class], Class]:
    """A class decorator: each of these methods raises NotImplementedError with its reason."""

    def add(cls: Class) -> Class:
        for name, reason in methods.items():
            setattr(cls, name, _refusing(cls, name, reason))
        return cls

    return add


def _refusing(cls: type, name: str, reason: str) -> Callable[..., NoReturn]:
    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not built: {reason}.")

    # As if defined in `cls`, so that it pickles as a reference.
    method.__module__, method.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
    method.__name__ = name
    # One string for all methods with the same reason: Ray pickles docstrings with an actor class.
    method.__doc__ = sys.intern(f"Not built: {reason}.")
    return method
