"""Every test has a case that `make test` runs, unless its author left all to the night."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiers import ONE_CASE, leave_to_the_night


class Item:
    """What `leave_to_the_night` needs of a case."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, [*marks]

    def get_closest_marker(self, name: str) -> object:
        return name if name in self.marks else None

    def add_marker(self, marker: Any) -> None:
        self.marks.append(marker.name)


def run_daily(*items: Item) -> list[str]:
    leave_to_the_night(items)  # type: ignore[arg-type]
    return [item.nodeid.partition("::")[2] for item in items if "nightly" not in item.marks]


@pytest.mark.parametrize("folder", ONE_CASE)
def test_the_first_case_of_each_test_is_run_where_cases_start_processes(folder: str) -> None:
    cases = [Item(f"{folder}x.py::test_{name}[{case}]") for name in "ab" for case in (2, 1)]
    assert run_daily(*cases, Item(f"{folder}x.py::test_c")) == ["test_a[2]", "test_b[2]", "test_c"]


def test_cases_marked_daily_are_run_in_place_of_the_first() -> None:
    marks = [(), ("daily",), (), ("daily",)]
    cases = [Item(f"tests/dist/x.py::test_a[{n}]", *own) for n, own in enumerate(marks)]
    assert run_daily(*cases) == ["test_a[1]", "test_a[3]"]


def test_elsewhere_every_case_is_run_but_for_dear_tests() -> None:
    quick = [Item(f"tests/unit/x.py::test_a[{n}]") for n in range(3)]
    dear = [Item(f"tests/unit/x.py::test_b[{n}]", "dear") for n in range(3)]
    assert run_daily(*quick, *dear) == ["test_a[0]", "test_a[1]", "test_a[2]", "test_b[0]"]


def test_a_test_that_is_left_to_the_night_stays_there() -> None:
    cases = [Item(f"tests/dist/x.py::test_a[{n}]", "nightly") for n in range(2)]
    assert run_daily(*cases) == []
