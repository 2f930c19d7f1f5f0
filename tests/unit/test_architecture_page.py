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


@pytest.mark.parametrize("tour", LONGEST)
def test_a_tour_is_short_and_its_files_exist(tour: str) -> None:
    (paragraph,) = (each for each in PAGE.split("\n\n") if each.startswith(f"**{tour}:**"))
    files = re.findall(r"`([\w/]+\.py)`", paragraph)
    assert 0 < len(files) <= LONGEST[tour]
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    found = [path.as_posix() for path in (*ROOT.glob("*/**/*.py"),)]
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in found)}
    assert len(named) > 40 and not missing, missing
