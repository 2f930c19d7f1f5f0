"""Cases that `make test` and `make test-latest` share out: every second one each. The cases that an
environment leaves to the other are sweeps there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, TypeVar

import pytest
from packaging.version import Version

_LATEST = int(Version(version("megatron-core")) >= Version("0.17"))


Test = TypeVar("Test", bound=Callable[..., None])


def in_turn(number: int) -> Callable[[Test], Test]:
    """A mark for slow tests that stand alone, numbered by their authors: even numbers are run by
    `make test`, odd ones by `make test-latest`.
    """
    return (lambda test: test) if number % 2 == _LATEST else pytest.mark.sweep


def in_turns(cases: Iterable[Any], name: Callable[[Any], str] | None = None) -> list[Any]:
    """The cases as parameters of a test, a tuple as several; `name` makes their ids."""
    return [
        pytest.param(
            *_values(case),
            id=name(case) if name else getattr(case, "id", None),
            marks=[*getattr(case, "marks", ()), *[pytest.mark.sweep] * (number % 2 != _LATEST)],
        )
        for number, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    if isinstance(case, type(pytest.param())):
        return case.values
    return case if isinstance(case, tuple) else (case,)
