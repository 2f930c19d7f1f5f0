"""Cases of dear tests are shared out between the environments, so that each is run by one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from tests import turns


class Item:
    """What `share_out` needs of a test."""

    def __init__(self, nodeid: str, swept: bool = False, marks: Collection[str] = ()) -> None:
        self.nodeid, self.swept, self.marks = nodeid, swept, marks

    def get_closest_marker(self, name: str) -> object:
        return (name == "sweep" and self.swept) or name in self.marks or None

    def add_marker(self, marker: Any) -> None:
        assert marker.name == "sweep"
        self.swept = True


def kept(monkeypatch: pytest.MonkeyPatch, latest: int, items: list[Item]) -> list[str]:
    monkeypatch.setattr(turns, "_LATEST", latest)
    turns.share_out(items)  # type: ignore[arg-type]
    return [item.nodeid for item in items if not item.swept]


@pytest.mark.parametrize(("folder", "share"), [("dist", 8), ("hosts/verl", 2), ("unit", 2)])
def test_each_environment_runs_other_cases_and_both_run_each_test(
    monkeypatch, folder: str, share: int
) -> None:
    table = [f"tests/{folder}/test_a.py::test_b[{i}-{k}]" for i in range(12) for k in "xy"]
    first = kept(monkeypatch, 0, [Item(name) for name in table])
    second = kept(monkeypatch, 1, [Item(name) for name in table])
    assert {*first, *second} <= {*table} and not {*first} & {*second}
    assert len(first) == len(second) == len(table) / share
    assert {name[-2] for name in first} == {name[-2] for name in second} == {"x", "y"}


@pytest.mark.parametrize("count", [2, 3, 4, 8, 9])
def test_of_few_cases_each_environment_runs_one_or_two(monkeypatch, count: int) -> None:
    table = [f"tests/dist/test_a.py::test_b[{i}]" for i in range(count)]
    ran = [kept(monkeypatch, latest, [Item(name) for name in table]) for latest in (0, 1)]
    assert [len(names) for names in ran] == [1 + (count > 8), 1]
    assert not {*ran[0]} & {*ran[1]}


@pytest.mark.parametrize(("parts", "expected"), [(2, "aceg"), (3, "adg"), (8, "a")])
def test_a_table_in_turns_is_shared_out_in_its_order(
    monkeypatch, parts: int, expected: str
) -> None:
    monkeypatch.setattr(turns, "_LATEST", 0)
    params = turns.in_turns("abcdefgh", str, parts=parts)
    assert "".join(param.id for param in params if not param.marks) == expected
    assert [param.values for param in params] == [(each,) for each in "abcdefgh"]


@pytest.mark.parametrize("latest", [0, 1])
def test_what_stands_elsewhere_or_is_shared_out_already_stays(monkeypatch, latest) -> None:
    elsewhere = [Item(f"tests/hosts/real/test_a.py::test_b[{i}]") for i in range(4)]
    whole = [Item(f"{turns.WHOLE[0]}::test_b[{i}]") for i in range(4)]
    already = [Item(f"tests/dist/test_a.py::test_c[{i}]", swept=i % 2 == 0) for i in range(4)]
    left = kept(monkeypatch, latest, [*elsewhere, *whole, *already])
    assert left == [item.nodeid for item in [*elsewhere, *whole, *already[1::2]]]


@pytest.mark.parametrize("folder", turns.SHARED)
def test_tests_of_one_case_are_run_by_one_environment(folder: str, monkeypatch) -> None:
    names = [f"{folder}test_a.py::test_{i}" for i in range(20)]
    first = kept(monkeypatch, 0, [Item(name) for name in names])
    second = kept(monkeypatch, 1, [Item(name) for name in names])
    assert sorted(first + second) == sorted(names)
    assert first and second


@pytest.mark.parametrize("latest", [0, 1])
@pytest.mark.parametrize("number", [0, 1])
def test_what_its_author_gave_to_one_environment_is_run_there_whatever_its_name(
    monkeypatch, latest: int, number: int
) -> None:
    monkeypatch.setattr(turns, "_LATEST", latest)
    mark = turns.in_turn(number).mark
    items = [
        Item(f"tests/ray/test_a.py::test_{i}", swept=mark.name == "sweep", marks=[mark.name])
        for i in range(20)
    ]
    assert len(kept(monkeypatch, latest, items)) == (20 if number == latest else 0)
