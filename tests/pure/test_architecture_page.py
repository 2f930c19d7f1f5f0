"""The guided tours of docs/architecture.md are short, and lead to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LONGEST = {
    "Follow a weight from file to parameter": 8,
    "Follow a batch to a loss": 8,
    "Follow a weight to an engine": 9,
    "Follow a key to what it does": 6,
}


def paths_in(text: str, base: str) -> list[Path]:
    """The files that a text names: those below the repository's root, and others below `base`."""
    names = re.findall(r"`([\w/]+\.py)`", text)
    roots = ("tests/", "converters/", "megatron_policy/")
    return [ROOT / name if name.startswith(roots) else ROOT / base / name for name in names]


@pytest.mark.parametrize("tour", LONGEST)
def test_a_tour_is_short_and_its_files_exist(tour: str) -> None:
    (paragraph,) = (each for each in PAGE.split("\n\n") if each.startswith(f"**{tour}:**"))
    files = paths_in(paragraph, "megatron_policy")
    assert 0 < len(files) <= LONGEST[tour]
    assert [file for file in files if not file.is_file()] == []


def test_every_file_that_the_page_names_exists() -> None:
    named = []
    for section in PAGE.split("\n## "):
        base = "converters" if section.startswith("Conversion") else "megatron_policy"
        named += paths_in(section, base)
    assert len(set(named)) > 40
    assert [path for path in named if not path.is_file()] == []
