"""The public interface is what tests/public_api.txt says: it changes on purpose only."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.public_api import FILE, text

ROOT = Path(__file__).resolve().parents[2]


def test_names_signatures_entry_points_and_options_are_those_that_were_agreed() -> None:
    found, agreed = text().splitlines(), FILE.read_text(encoding="utf-8").splitlines()
    new = [line for line in found if line not in agreed]
    gone = [line for line in agreed if line not in found]
    assert found == agreed, (
        f"new: {new}, gone: {gone}. If that is meant, run `python -m tests.public_api` and say so "
        "in the change"
    )


def test_every_folder_says_what_lives_there_and_what_to_read_first() -> None:
    folders = (ROOT / "megatron_policy", ROOT / "converters")  # a walk does not follow the link
    for file in sorted(each for folder in folders for each in folder.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        assert len(docstring) > 40, f"{file}: no docstring that says what lives here"
        if file.parent.name != "megatron_policy":
            assert "Read `" in " ".join(docstring.split()), (
                f"{file}: does not say what to read first"
            )
            for name in docstring.split("`")[1::2]:
                if name.endswith(".py"):
                    assert (file.parent / name).is_file(), f"{file}: there is no {name}"
