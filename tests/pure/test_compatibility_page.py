"""The page of what of NeMo RL is there is of the tables that the package goes by."""

from __future__ import annotations

from megatron_policy.config.keys import KEYS
from megatron_policy.hosts.nemo_rl.not_implemented import NOT_IMPLEMENTED
from tests.compatibility import page


def test_the_page_on_disk_is_made_of_the_tables_as_they_are() -> None:
    found = page.PAGE.read_text(encoding="utf-8")
    assert found == page.render(), f"docs/compatibility.md is of other tables: run `{page.COMMAND}`"


def test_the_page_names_every_key_and_every_refused_method() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    names = {path.rsplit(".", 1)[-1] for path in KEYS} - {"*"} | set(NOT_IMPLEMENTED)
    assert {name for name in names if f"`{name}`" not in text} == set()
