"""The tiers of this suite, see CONTRIBUTING.md: which cases of a test `make test` runs.

Where the cases of a test compute in several processes, or take seconds and have the mark `dear`,
the first one is run every day; its author puts that one first which tells most. Cases with the mark
`daily` are run in its place, and a test with the mark `nightly` is for the night alone. How
layouts, batchings, losses and kinds of models meet is the subject of `tests/invariance/array.py`,
of which every cell is run.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

ONE_CASE = ("tests/dist/", "tests/hosts/test_", "tests/ray/")
"""Where `make test` runs a single case of every test."""


def leave_to_the_night(items: Iterable[pytest.Item]) -> None:
    """Mark as `nightly` the cases that `make test` leaves out."""
    of_tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(ONE_CASE) or item.get_closest_marker("dear"):
            of_tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in of_tests.values():
        daily = [case for case in cases if case.get_closest_marker("daily")] or cases[:1]
        for case in cases:
            if case not in daily:
                case.add_marker(pytest.mark.nightly)
