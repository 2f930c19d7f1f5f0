"""Titles of pages and of their sections, and what the first words of a page say it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.site.links import FENCE

LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
_HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_SENTENCE = re.compile(r".+?[^.]\.(?=\s|$)")
_NOT_PROSE = ("#", "|", "!", "```", "- ", "* ", "<", "$")


@dataclass(frozen=True)
class Heading:
    """A title, with its line, its level (1 is the page's own) and the anchor of its section."""

    line: int
    level: int
    title: str

    @property
    def anchor(self) -> str:
        """As GitHub and the site make it."""
        return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", self.title.strip().lower()))


def headings(text: str) -> Iterator[Heading]:
    """The titles of a page, in order."""
    prose = FENCE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for found in _HEADING.finditer(prose):
        line = prose.count("\n", 0, found.start()) + 1
        yield Heading(line, len(found[1]), LINK.sub(r"\1", found[2]).strip())


def title_of(text: str) -> str:
    return next(headings(text)).title


def section(text: str, anchor: str) -> range:
    """The lines of a section, with those of the sections in it; none if there is no such title."""
    found = list(headings(text))
    for place, heading in enumerate(found):
        if heading.anchor == anchor:
            later = (each.line for each in found[place + 1 :] if each.level <= heading.level)
            return range(heading.line, next(later, text.count("\n") + 2))
    return range(0)


def first_paragraph(text: str) -> str:
    """The first prose of a page, in one line and without links; empty if there is none."""
    for paragraph in re.split(r"\n\s*\n", _COMMENT.sub("", text)):
        if not paragraph.strip().startswith(_NOT_PROSE):
            return " ".join(LINK.sub(r"\1", paragraph).replace("**", "").split())
    return ""


def summary_of(text: str) -> str:
    """The first sentence of a page's prose."""
    plain = first_paragraph(text)
    sentence = _SENTENCE.match(plain)
    return sentence[0] if sentence else plain
