"""docs/llms.txt: the site's pages for programs that read text (https://llmstxt.org), made from the
menu of mkdocs.yml and the first sentence of each page; `python -m tests.site.made` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.site import names
from tests.site.titles import first_paragraph, summary_of, title_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FILE = DOCS / "llms.txt"
FIRST = "Begin"
"""The section of the pages that are in no section of the menu."""
NOTE = "Each page below that ends in .md is also a page of the site, with .html in its place."


def text() -> str:
    """What the file has: the home page's title and summary, and a section for each of the menu."""
    home = page_text("index.md")
    parts = [f"# {title_of(home)}", f"> {first_paragraph(home)}", NOTE]
    for section, pages in sections():
        lines = [f"- [{title}]({link}): {summary}" for title, link, summary in pages]
        parts.append("\n".join([f"## {section}", "", *lines]))
    return "\n\n".join(parts) + "\n"


def page_text(page: str) -> str:
    """What the file of a page has."""
    return (DOCS / page).read_text(encoding="utf-8")


def menu() -> list[Any]:
    _, _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    entries: list[Any] = yaml.safe_load(nav)
    return entries


def sections() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """The menu's sections, each with title, link and summary of its pages."""
    single, grouped = [], []
    for entry in menu():
        ((title, inside),) = entry.items()
        if isinstance(inside, list):
            grouped.append((title, [page for each in inside for page in _pages(each)]))
        else:
            single += _pages(entry)
    yield FIRST, single
    yield from grouped


def _pages(entry: Any) -> Iterator[tuple[str, str, str]]:
    title, path = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
    if path == f"{names.FOLDER}/":
        for room, members in names.shown().items():
            public = ", ".join(f"`{each.rpartition('.')[2]}`" for each in members)
            yield names.title_of(room), f"{names.FOLDER}/{room}.html", public
    elif path.endswith("/"):
        for file in sorted(
            (DOCS / path).rglob("*.md"), key=lambda each: (each.stem != "index", each)
        ):
            page = file.relative_to(DOCS).as_posix()
            yield title_of(page_text(page)), page, summary_of(page_text(page))
    else:
        found = page_text(path)
        yield title or title_of(found), path, summary_of(found)
