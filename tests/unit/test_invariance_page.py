"""The page of measured differences is of the table that is run, and every number is within its
tolerance.
"""

from __future__ import annotations

import re

import pytest

from tests.invariance import page
from tests.invariance.cases import CELLS
from tests.invariance.compare import QUANTITIES
from tests.invariance.further import BF16, FURTHER, Collected, FurtherCell, Table

TABLES = [table.name for table in FURTHER]


def test_the_page_lists_the_cells_of_the_table_each_within_its_tolerance() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    *lines, worst, share = page.lines(text)
    assert [line.names for line in lines] == [page.names_of(cell) for cell in CELLS], (
        "docs/invariance.md is of another table: run `make invariance`"
    )
    assert (worst.names[0], share.names[0]) == (page.WORST, page.SHARE)
    by_quantity = zip(*(line.numbers for line in lines), strict=True)
    assert worst.numbers == tuple(map(max, by_quantity))
    assert all(0 < number <= 1 for number in share.numbers)
    assert len(share.numbers) == len(QUANTITIES)


def test_the_page_was_measured_with_the_versions_that_are_pinned() -> None:
    pins = (page.PAGE.parents[1] / ".ci" / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([a-z-]+)==([\w.]+)$", pins, re.MULTILINE))
    found = page.versions(page.PAGE.read_text(encoding="utf-8"))
    assert found == {name: pinned[name] for name in page.PACKAGES}, "run `make invariance`"


def test_a_page_is_read_back_as_it_was_rendered_and_one_of_part_of_the_table_not_written() -> None:
    with pytest.raises(AssertionError, match="whole table"):
        page.write({CELLS[0]: dict.fromkeys(QUANTITIES, page.Found(0.0, 1e-5))})
    found = {name: page.Found(n * 1e-7, 1e-5) for n, name in enumerate(QUANTITIES)}
    *lines, worst, share = page.lines(
        page.render(dict.fromkeys(CELLS, found), dict.fromkeys(TABLES, ""))
    )
    assert [line.names for line in lines] == [page.names_of(cell) for cell in CELLS]
    numbers = tuple(n * 1e-7 for n in range(len(QUANTITIES)))
    assert {line.numbers for line in (*lines, worst)} == {numbers}
    assert share.numbers == tuple(n / 100 for n in range(len(QUANTITIES)))


@pytest.mark.parametrize("table", FURTHER, ids=lambda table: table.name)
def test_the_page_lists_the_rows_of_further_tables_each_within_its_tolerance(table: Table) -> None:
    *lines, share = page.further_lines(page.PAGE.read_text(encoding="utf-8"), table)
    assert [FurtherCell(*line.names) for line in lines] == [*table.cells]
    for line in lines:  # losses, gradient norms and weights
        largest = 0.02 if line.names[2] == BF16 else 1e-5
        assert all(0 < number < largest for number in line.numbers[:3]), line
    assert share.names[0] == page.SHARE and all(0 < number <= 1 for number in share.numbers)


@pytest.mark.parametrize("table", FURTHER, ids=lambda table: table.name)
def test_rows_of_further_tables_are_read_back_as_they_were_rendered(table: Table) -> None:
    found = {name: page.Found(n * 1e-7, 1e-5) for n, name in enumerate(table.quantities)}
    rendered = page.render_further(table, dict.fromkeys(table.cells, found))
    *lines, share = page.further_lines(f"before\n\n{rendered}\n\nafter", table)
    numbers = tuple(n * 1e-7 for n in range(len(table.quantities)))
    assert {line.numbers for line in lines} == {numbers}
    assert share.numbers == tuple(n / 100 for n in range(len(table.quantities)))
    with pytest.raises(AssertionError, match="every row"):
        page.write_further(Collected(table))
