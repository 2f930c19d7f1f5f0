"""The page docs/compatibility.md: page.md filled from the table of keys and the worker's methods.

`python -m tests.compatibility.page` writes it. It runs no host.
"""

from __future__ import annotations

import textwrap
from itertools import groupby
from pathlib import Path

from megatron_policy.config.keys import SECTIONS
from megatron_policy.config.section import Applied, Ignored, Nested, Rejected, Rule
from megatron_policy.hosts.nemo_rl.not_implemented import NOT_IMPLEMENTED
from tests.hosts.methods import FORMS
from tests.site import settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
TEMPLATE = Path(__file__).with_suffix(".md")
COMMAND = "make compatibility"


NOTES = {
    "generation.": (
        "What is rejected is so where the policy itself generates (`backend` is absent or "
        "`megatron`): with another\nengine, these keys are that engine's and pass.\n\n"
    )
}
"""What stands above the table of a section."""


def render() -> str:
    tables = (
        f"### {_title(prefix)}\n\n{NOTES.get(prefix, '')}{table_of(_rules(keys))}"
        for prefix, keys in settings.sections()
        if prefix in SECTIONS
    )
    text = TEMPLATE.read_text(encoding="utf-8").format(
        command=COMMAND,
        there=_quoted(sorted(set(FORMS) - set(NOT_IMPLEMENTED))),
        refused=_rows([(_quoted(names), why) for why, names in _by_reason()]),
        keys="\n\n".join(tables),
        count=sum(name != "*" for rules in SECTIONS.values() for name in rules),
    )
    return "\n\n".join(wrapped(part) for part in text.split("\n\n")).rstrip() + "\n"


def _title(prefix: str) -> str:
    return f"`policy.{prefix}`".removesuffix(".`").rstrip("`") + "`"


def _rules(keys: list[settings.Key]) -> dict[str, tuple[Rule, str]]:
    return {key.path.rsplit(".", 1)[-1]: (key.rule, key.about) for key in keys}


def table_of(rules: dict[str, tuple[Rule, str]]) -> str:
    """One row for all keys of a section that share a rule, in the order of the first of them; of an
    applied key with what it does.
    """
    shared: dict[tuple[str, str], list[str]] = {}
    for name, (rule, about) in rules.items():
        shared.setdefault(_said(rule, about), []).append(name)
    rows = [(_quoted(names), *said) for said, names in shared.items()]
    order = ("applied", "section", "ignored", "ignored with a warning", "rejected")
    rows.sort(key=lambda row: order.index(row[1]))
    header = ("key", "is", "why, or what it means")
    return _rows([header, ("---", "---", "---"), *rows])


def _said(rule: Rule, about: str) -> tuple[str, str]:
    if isinstance(rule, Applied):
        return "applied", about
    if isinstance(rule, Ignored):
        return "ignored with a warning" if rule.warned else "ignored", rule.why
    if isinstance(rule, Rejected):
        if rule.same_as:
            return "rejected", f"{rule.why}: passes where it equals `{rule.same_as}`"
        return "rejected", rule.why
    assert isinstance(rule, Nested)
    return "section", "see below"


def _by_reason() -> list[tuple[str, list[str]]]:
    ordered = sorted(NOT_IMPLEMENTED, key=lambda name: NOT_IMPLEMENTED[name])
    groups = groupby(ordered, key=lambda name: NOT_IMPLEMENTED[name])
    return [(why, sorted(names)) for why, names in groups]


def _quoted(names: list[str]) -> str:
    return ", ".join("any other key" if name == "*" else f"`{name}`" for name in names)


def _rows(rows: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row).replace("  ", " ") + " |" for row in rows)


def wrapped(paragraph: str) -> str:
    """A paragraph in lines of 120 characters; tables, lists and headings as they are."""
    if paragraph.startswith(("|", "#", "-", "```")):
        return paragraph
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
