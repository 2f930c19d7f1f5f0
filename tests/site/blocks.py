"""The code blocks of the pages and of the READMEs of examples: which are run, by what, and why
others are not.

A block of `python` or `console` is run by tests/dist/test_doc_blocks.py, together with those before
it on the page, unless the line above says otherwise:

    <!-- run by tests/dist/test_docs.py -->
    <!-- not run: needs a GPU -->

`<!-- also run` and `-->`, on lines of their own, hold code that runs there and is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
            yield Block(page, line, "python", found["hidden"])
        else:
            shown = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
            yield Block(page, line, found["kind"], shown, found["mark"] or "")


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


def to_run(page: str) -> list[Block]:
    """The blocks of a page that are run with the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [block for block in blocks_of(page, text) if not block.mark]
