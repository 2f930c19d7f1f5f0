"""The page docs/invariance.md: page.md filled with what a run of the table measured, and read back;
runs nothing.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sized
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path

from tests.dist.layouts import SIZES
from tests.exact import ROOM
from tests.invariance import cases
from tests.invariance.array import ARRAY
from tests.invariance.cases import CELLS, LENGTHS, ROWS, Cell
from tests.invariance.compare import QUANTITIES
from tests.invariance.further import FURTHER, Collected, FurtherCell, Table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "invariance.md"
TEMPLATE = Path(__file__).with_suffix(".md")
WRITE = "INVARIANCE_PAGE"
"""Set in the environment, a run of the whole table writes the page."""
PACKAGES = ("torch", "megatron-core", "transformers")


@dataclass(frozen=True)
class Found:
    """The worst difference of a quantity in a cell, and what rounding can explain."""

    difference: float
    tolerance: float


Measured = Mapping[Cell, Mapping[str, Found]]
WORST, SHARE = "the worst of all", "of its tolerance, at most"


@dataclass(frozen=True)
class Line:
    """One row of the page's table: its first columns, which name a cell, and the numbers."""

    names: tuple[str, ...]
    numbers: tuple[float, ...]


def names_of(cell: Cell) -> tuple[str, ...]:
    """A cell's first columns."""
    return (cell.layout, cell.batching_in_words, cell.loss_in_words, cell.family)


def lines(text: str) -> list[Line]:
    """The rows of the table of results of a page, the last two of which are about the others."""
    found = []
    for line in text.splitlines():
        columns = [column.strip() for column in line.strip().strip("|").split("|")]
        if len(columns) == 4 + len(QUANTITIES) and re.match(r"\d|\*\*\d", columns[-1]):
            names = tuple(name.strip("`*") for name in columns[:4])
            found.append(Line(names, tuple(float(n.strip("*")) for n in columns[4:])))
    return found


def versions(text: str) -> dict[str, str]:
    """The versions a page says it was made with."""
    return dict(re.findall(r"\| `([a-z-]+)` \| ([\w.]+) \|", text))


def write(measured: Measured) -> None:
    """The page, from the worst differences of every cell of the table."""
    assert set(measured) == set(CELLS), "the page needs a run of the whole table"
    text = PAGE.read_text(encoding="utf-8")
    kept = {each.name: further_table(text, each) for each in FURTHER}
    PAGE.write_text(render(measured, kept), encoding="utf-8")


def write_further(collected: Collected) -> None:
    """Renew the rows of one of the further tables alone, from the differences of all of them."""
    table = collected.table
    measured = {
        cell: {name: Found(*both) for name, both in record.items()}
        for cell, record in collected.found.items()
    }
    missing = set(table.cells) - set(measured)
    assert not missing, f"the page needs a run of every row: {missing}"
    text = PAGE.read_text(encoding="utf-8")
    new = text.replace(further_table(text, table), render_further(table, measured))
    PAGE.write_text(new, encoding="utf-8")


def render_further(table: Table, measured: Mapping[FurtherCell, Mapping[str, Found]]) -> str:
    """One of the further tables, with the largest share of a tolerance below."""
    rows = [" | ".join((*table.columns, *table.quantities.values()))]
    rows.append(" | ".join(["---"] * len(table.columns) + ["---:"] * len(table.quantities)))
    own = [measured[cell] for cell in table.cells]
    for cell, found in zip(table.cells, own, strict=True):
        numbers = (f"{found[name].difference:.1e}" for name in table.quantities)
        rows.append(" | ".join((*astuple(cell), *numbers)))
    shares = (
        max(found[name].difference / found[name].tolerance for found in own)
        for name in table.quantities
    )
    rows.append(" | ".join((f"**{SHARE}**", "", "", "", *(f"**{share:.2f}**" for share in shares))))
    return "\n".join(f"| {row} |" for row in rows)


def further_table(text: str, table: Table) -> str:
    """One of the further tables as it is in a page's text."""
    first = "| " + " | ".join(table.columns) + " |"
    (paragraph,) = (each for each in text.split("\n\n") if each.startswith(first))
    return paragraph.rstrip()


def further_lines(text: str, table: Table) -> list[Line]:
    """The rows of that table, the last of which is about the others."""
    found = []
    for line in further_table(text, table).splitlines()[2:]:
        columns = [column.strip(" *") for column in line.strip("|").split("|")]
        found.append(Line(tuple(columns[:4]), tuple(map(float, columns[4:]))))
    return found


def render(measured: Measured, further: Mapping[str, str]) -> str:
    """The page's text; the further tables are given, by their names."""
    header = ("layout", "batching", "loss", "family", *QUANTITIES)
    rows = [
        " | ".join(
            (*names_of(cell), *(f"{measured[cell][name].difference:.1e}" for name in QUANTITIES))
        )
        for cell in CELLS
    ]
    table = [" | ".join(header), " | ".join(["---"] * 4 + ["---:"] * len(QUANTITIES)), *rows]
    columns = [[measured[cell][name] for cell in CELLS] for name in QUANTITIES]
    worst = [max(found.difference for found in column) for column in columns]
    share = [max(found.difference / found.tolerance for found in column) for column in columns]
    for title, numbers, digits in ((WORST, worst, ".1e"), (SHARE, share, ".2f")):
        cells = (f"**{number:{digits}}**" for number in numbers)
        table.append(" | ".join((f"**{title}**", "", "", "", *cells)))
    packages = [f"| `{name}` | {version(name).partition('+')[0]} |" for name in PACKAGES]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        table="\n".join(f"| {row} |" for row in table),
        **further,
        versions="\n".join(["| package | version |", "|---|---|", *packages]),
        cases=cases,
        sizes=SIZES,
        count={name: len(value) for name, value in vars(cases).items() if isinstance(value, Sized)},
        product=len(cases.LAYOUTS) * len(cases.BATCHINGS) * len(cases.LOSSES) * len(cases.FAMILIES),
        latin=len(cases.LAYOUTS) * len(cases.BATCHINGS),
        small=sum(cell.rows != ROWS for cell in CELLS) - len(cases.FEW_OF_EXPERTS),
        expert_latin=len(cases.EXPERT_LAYOUTS) * len(cases.BATCHINGS),
        fsdp_latin=sum(cell.layout in cases.FSDP2_LAYOUTS for cell in CELLS),
        array=len(ARRAY),
        array_layouts=len({cell.layout for cell in ARRAY}),
        room=ROOM,
        lengths=", ".join(map(str, LENGTHS[:ROWS])) + " and " + ", ".join(map(str, LENGTHS[ROWS:])),
        ones=LENGTHS.count(1),
    )
    return "\n\n".join(map(wrapped, text.split("\n\n")))


def wrapped(paragraph: str) -> str:
    """A paragraph in lines of 120 characters; tables and headings as they are."""
    if paragraph.startswith(("|", "#")):
        return paragraph
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)
