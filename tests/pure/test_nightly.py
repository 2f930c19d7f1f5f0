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
    line_of,
    parse,
    with_row,
)

REPORT = """<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>"""


def test_counts_are_those_of_pytests_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert Outcome.read(report) == Outcome(passed=3, failed=3, skipped=3)


def test_a_row_takes_the_place_of_the_environments_last_one() -> None:
    page = PAGE.read_text()
    assert page.count(BEGIN) == 1
    first, *_, last = ENVIRONMENTS
    rows = [
        line_of([name, "x" * number, *COLUMNS[2:]]) for number, name in enumerate((last, first))
    ]
    for row in rows:
        page = with_row(page, row.split()[1], row)
    assert all(page.count(row) == 1 for row in rows)
    assert page.index(rows[1]) < page.index(rows[0]), "in the order of the environments"
    newer = line_of([last, "3.14", *COLUMNS[2:]])
    page = with_row(page, last, newer)
    assert newer in page and rows[0] not in page and rows[1] in page
    assert with_row(page, last, newer) == page


def test_what_is_for_pytest_names_no_environment(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse(["latest", "--seed", "7", "--pytest", "-n", "3", "--no-loadscope-reorder"])
    assert (given.environments, given.seed) == (["latest"], 7)
    assert given.pytest == ["-n", "3", "--no-loadscope-reorder"]
    assert parse(["--pytest", "-n", "3"]).environments == list(ENVIRONMENTS)
    with pytest.raises(SystemExit):
        parse(["newest"])
    assert "there are pinned, latest, gpu-image" in capsys.readouterr().err
