"""Gives a class methods that another object of its own carries out; knows neither of them."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def delegates(attribute: str, to: type) -> Callable[[Class], Class]:
    """A class decorator: every public method of `to` becomes one of the class, carried out by the
    instance's `attribute`, an instance of `to`. What the class defines itself stays its own.
    """

    def add(cls: Class) -> Class:
        for name, method in vars(to).items():
            if callable(method) and not name.startswith("_") and name not in vars(cls):
                setattr(cls, name, placed(cls, name, _delegate(attribute, name, method)))
        abc.update_abstractmethods(cls)
        return cls

    return add


def placed(cls: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` as one that `cls` defines under `name`, so that it pickles as a reference to it."""
    method.__module__, method.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
    return method


def _delegate(attribute: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, attribute), name)(*args, **kwargs)

    return call
