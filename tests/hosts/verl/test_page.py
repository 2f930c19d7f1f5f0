"""The page of verl's keys is of the table that the engine goes by."""

from __future__ import annotations

from megatron_policy.hosts.verl.keys import SECTIONS
from tests.compatibility import verl_page


def test_the_page_on_disk_is_made_of_the_table_as_it_is() -> None:
    found = verl_page.PAGE.read_text(encoding="utf-8")
    command = verl_page.COMMAND
    assert found == verl_page.render(), f"docs/verl-keys.md is of another table: run `{command}`"


def test_the_page_names_every_key() -> None:
    text = verl_page.PAGE.read_text(encoding="utf-8")
    names = {name for rules in SECTIONS.values() for name in rules} - {"*"}
    assert {name for name in names if f"`{name}`" not in text} == set()
