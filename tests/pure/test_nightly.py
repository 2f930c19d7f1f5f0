"""The page that says when all cases last ran keeps a row for each environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nightly import (
    BEGIN,
    COLUMNS,
    ENVIRONMENTS,
    PAGE,
    Outcome,
    files_of,
    line_of,
    parse,
    with_row,
)

REPORT = """<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>"""


def test_counts_are_those_of_pytests_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert Outcome.read(report) == Outcome(passed=3, failed=3, skipped=3)


def row_of(name: str, part: str, python: str = "3.12") -> str:
    return line_of([name, part, python, *COLUMNS[3:]])


def test_a_row_takes_the_place_of_the_environments_last_one() -> None:
    page = PAGE.read_text()
    assert page.count(BEGIN) == 1
    first, *_, last = ENVIRONMENTS
    rows = [row_of(last, "1/2"), row_of(last, "2/2"), row_of(first, "1/1")]
    for row in rows:
        page = with_row(page, row)
    assert all(page.count(row) == 1 for row in rows)
    at = [page.index(row) for row in rows]
    assert at[2] < at[0] < at[1], "in the order of the environments and their parts"
    newer = row_of(last, "1/2", "3.14")
    page = with_row(page, newer)
    assert newer in page and rows[0] not in page and rows[1] in page and rows[2] in page
    assert with_row(page, newer) == page
    page = with_row(page, row_of(last, "1/1"))
    assert newer not in page and rows[1] not in page and rows[2] in page


def test_parts_are_all_files_each_once() -> None:
    parts = [files_of(f"{number}/4") for number in range(1, 5)]
    whole = files_of("1/1")
    assert sorted(file for part in parts for file in part) == whole and len(whole) > 200
    assert all(Path(PAGE.parents[1] / file).is_file() for file in whole)


def test_what_is_for_pytest_names_no_environment(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse(["latest", "--seed", "7", "--pytest", "-n", "3", "--no-loadscope-reorder"])
    assert (given.environments, given.seed) == (["latest"], 7)
    assert given.pytest == ["-n", "3", "--no-loadscope-reorder"]
    assert parse(["--pytest", "-n", "3"]).environments == list(ENVIRONMENTS)
    with pytest.raises(SystemExit):
        parse(["newest"])
    assert "there are pinned, latest, gpu-image" in capsys.readouterr().err
    for part in ("3/2", "0/2", "half"):
        with pytest.raises(SystemExit):
            parse(["latest", "--part", part])
        assert f"no part {part}" in capsys.readouterr().err
