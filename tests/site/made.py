"""The regions of docs/reference that are made from the code, between `<!-- made: NAME -->` and
`<!-- end -->`; `python -m tests.site.made` writes them, and docs/llms.txt.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.site import commands, llms, settings

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
TABLES = {"configuration": settings.tables, "commands": commands.sections}
_REGION = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page's text with its regions as the code makes them."""
    return _REGION.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def pages() -> list[Path]:
    """The pages with such regions."""
    return [file for file in sorted(REFERENCE.glob("*.md")) if _REGION.search(file.read_text())]


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    llms.FILE.write_text(llms.text(), encoding="utf-8")
