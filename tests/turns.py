"""Cases that `make test` and `make test-latest` share out. What an environment does not run of a
test is a sweep there: `make sweep` runs it.

In `SHARED` the cases of every test are shared out that has not done so itself, and tests with one
case are run by one environment. Of a test in `ALONE`, where processes are started, each environment
runs every eighth case; the sweeps of both are the rest. Of others each runs every second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from importlib.metadata import version
from typing import Any, TypeVar
from zlib import crc32

import pytest
from packaging.version import Version

_LATEST = int(Version(version("megatron-core")) >= Version("0.17"))
_PARTS = 8

Test = TypeVar("Test", bound=Callable[..., None])


def in_turn(number: int) -> Callable[[Test], Test]:
    """A mark for slow tests that stand alone, numbered by their authors: even numbers are run by
    `make test`, odd ones by `make test-latest`.
    """
    return pytest.mark.in_turn if number % 2 == _LATEST else pytest.mark.sweep


def in_turns(
    cases: Iterable[Any], name: Callable[[Any], str] | None = None, parts: int = _PARTS
) -> list[Any]:
    """The cases as parameters of a test, a tuple as several; `name` makes their ids. Each
    environment runs one of so many parts; where there are fewer cases, one of them.
    """
    cases = list(cases)
    parts = _parts(cases, parts)
    return [
        pytest.param(
            *_values(case),
            id=name(case) if name else getattr(case, "id", None),
            marks=[*getattr(case, "marks", ()), *[pytest.mark.sweep] * (number % parts != _LATEST)],
        )
        for number, case in enumerate(cases)
    ]


SHARED = ("tests/dist/", "tests/hosts/test_", "tests/hosts/verl/", "tests/ray/", "tests/unit/")
ALONE = ("tests/dist/", "tests/hosts/test_", "tests/ray/")
WHOLE = tuple(
    f"tests/unit/test_{name}.py"
    for name in (
        *("fake_device", "triton_tiles", "varlen_attention", "norm"),
        *("device", "package", "english", "turns"),
    )
)
"""Of these files some tests run in one environment alone, or all cases belong together."""


def share_out(items: Iterable[pytest.Item]) -> None:
    """Mark what the other environment runs of the tests in `SHARED` as sweeps."""
    of_tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(SHARED) and not item.nodeid.startswith(WHOLE):
            of_tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for nodeid, cases in of_tests.items():
        if any(case.get_closest_marker(mark) for case in cases for mark in ("sweep", "in_turn")):
            continue
        parts = _parts(cases, _PARTS if nodeid.startswith(ALONE) else 2)
        # In an order of their own: every second one in the order of a table with two columns is one
        # column.
        for number, case in enumerate(sorted(cases, key=lambda each: crc32(each.nodeid.encode()))):
            if len(cases) == 1:
                number = crc32(nodeid.encode())
            if number % parts != _LATEST:
                case.add_marker(pytest.mark.sweep)


def _parts(cases: Sized, at_most: int) -> int:
    """Two at least: a single case is run by one environment."""
    return max(2, min(at_most, len(cases)))


def _values(case: Any) -> tuple[Any, ...]:
    if isinstance(case, type(pytest.param())):
        return case.values
    return case if isinstance(case, tuple) else (case,)
