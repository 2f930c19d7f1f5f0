"""The code blocks of the pages and of the READMEs of examples: which are run, by what, and why
others are not.

A block of `python` or `console` is run by tests/dist/test_doc_blocks.py, together with those before
it on the page, unless the line above says otherwise:

    <!-- run by tests/dist/test_docs.py -->
    <!-- not run: needs a GPU -->

`<!-- also run` and `-->`, on lines of their own, hold assertions that run there and are not shown.

What a block needs is in blocks that are shown: those before it on the page, or those of a section
that the paragraph above it names:

    This continues [the shortest example](index.md#the-shortest-example):
"""

from __future__ import annotations

import ast
import builtins
import posixpath
import re
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.site.titles import section

ROOT = Path(__file__).resolve().parents[2]
REASONS = (
    "needs a GPU",
    "needs a cluster",
    "needs an engine",
    "needs NeMo RL",
    "needs verl",
    "needs a network",
    "takes minutes",
    "part of a program",
)
"""How a reason begins; more can follow."""
CONTINUES = re.compile(r"\bcontinues?\s[^.]*?\[[^]]*\]\(([^)#\s]*)#([^)\s]+)\)", re.IGNORECASE)
_MARK = re.compile(r"^<!-- (?:run by|not run)[^\n]* -->\n?", re.MULTILINE)
_PLACEHOLDER = re.compile(r"(?<![\w$/.-])[A-Z][A-Z_]{2,}(?![\w=/-])|(?<=\s)\.\.\.(?=\s)")
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?:run by|not run)[^\n]*) -->\n)?"
    r"^(?P<indent> *)```(?P<kind>python|console)[^\n]*\n(?P<text>.*?)^(?P=indent)```$"
    r"|^<!-- also run\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page: its text, its language, where it is, and what is said above it."""

    page: str
    line: int
    kind: str
    text: str
    mark: str = ""
    above: str = ""
    """The paragraph above it."""
    hidden: bool = False

    @property
    def continues(self) -> tuple[str, str] | None:
        """Page and section that it continues, if the paragraph above says so."""
        found = CONTINUES.search(self.above)
        if found is None:
            return None
        folder = posixpath.dirname(self.page)
        page = posixpath.normpath(posixpath.join(folder, found[1])) if found[1] else self.page
        return page, found[2]

    @property
    def run_by(self) -> str:
        """The test that runs it, if it is not run as all others are."""
        return self.mark.removeprefix("run by ") if self.mark.startswith("run by ") else ""

    @property
    def reason(self) -> str | None:
        """Why it is not run, if it is not."""
        return self.mark.removeprefix("not run:").strip() if self.mark.startswith("not") else None

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """The READMEs and all pages, by their paths in the repository."""
    found = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("README.md")]
    return ["README.md", *sorted(each.relative_to(ROOT).as_posix() for each in found)]


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The blocks of a page that are code, in order."""
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["hidden"] is not None:
            yield Block(page, line, "python", found["hidden"], hidden=True)
        else:
            shown = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
            *_, above = re.split(r"\n\s*\n", _MARK.sub("", text[: found.start()]).rstrip())
            yield Block(page, line, found["kind"], shown, found["mark"] or "", above)


def problems(block: Block) -> Iterator[str]:
    """What is wrong with the mark of a block."""
    if block.run_by:
        test = ROOT / block.run_by
        folder = "/".join(block.page.split("/")[:2])  # of a README; a page goes by its name
        name = folder if folder.startswith("examples/") else block.page.rpartition("/")[2]
        if not test.is_file():
            yield f"{block.place}: there is no {block.run_by}"
        elif name not in test.read_text(encoding="utf-8"):
            yield f"{block.place}: {block.run_by} does not name {name}"
    elif block.reason is not None and not block.reason.startswith(REASONS):
        yield f"{block.place}: a reason begins with one of {', '.join(map(repr, REASONS))}"
    if block.hidden and not all(
        isinstance(each, ast.Assert) for each in ast.parse(block.text).body
    ):
        yield f"{block.place}: hidden code is assertions alone; show what sets something up"


def page_text(page: str) -> str:
    """What the file of a page has."""
    return (ROOT / page).read_text(encoding="utf-8")


def set_up(block: Block) -> list[Block]:
    """The code of the section that a block continues."""
    if block.continues is None:
        return []
    page, anchor = block.continues
    text = page_text(page)
    lines = section(text, anchor)
    shown = [each for each in blocks_of(page, text) if each.line in lines and not each.hidden]
    return [each for each in shown if each.kind == "python" and each.line != block.line]


def to_run(page: str) -> list[Block]:
    """The blocks of a page that are run with the page, each after those that it continues."""
    run = [block for block in blocks_of(page, page_text(page)) if not block.mark]
    return [each for block in run for each in (*set_up(block), block)]


def names_of(text: str) -> tuple[set[str], set[str]]:
    """The names that Python code takes from outside, and those that it gives."""
    used: set[str] = set()
    given: set[str] = set()
    tables = [symtable.symtable(text, "block", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        whole = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (whole or symbol.is_global()):
                used.add(symbol.get_name())
            if whole and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                given.add(symbol.get_name())
    return used - given - set(dir(builtins)), given


def unexplained(page: str, text: str) -> Iterator[str]:
    """What a reader who pastes a page's code lacks: names that no block shows, and words of the
    first example, such as FILE, that the paragraph above it does not explain.
    """
    known: set[str] = set()
    shown = [block for block in blocks_of(page, text) if not block.hidden]
    for block in shown:
        if block.kind == "python":
            for each in set_up(block):
                known |= names_of(each.text)[1]
            used, given = names_of(block.text)
            explained = set(re.findall(r"`(\w+)`", block.above))
            if lacking := sorted(used - known - explained):
                yield f"{block.place}: no block before it gives {', '.join(lacking)}"
            known |= given
    for block in shown[:1]:
        code = re.sub(r"#.*", "", block.text) if block.kind == "console" else ""
        words = set(_PLACEHOLDER.findall("\n".join(re.findall(r"^\$ (.*)$", code, re.MULTILINE))))
        if lacking := sorted(word for word in words if f"`{word}`" not in block.above):
            yield f"{block.place}: the paragraph above it does not explain {', '.join(lacking)}"
