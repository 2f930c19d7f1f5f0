"""The page docs/verl-keys.md: verl_page.md filled from the table of verl's keys.

`python -m tests.compatibility.verl_page` writes it. It runs no host.
"""

from __future__ import annotations

from pathlib import Path

from megatron_policy.config.section import Rule, Rules
from megatron_policy.hosts.verl.keys import SAME_AS, SECTIONS
from megatron_policy.hosts.verl.megatron_fields import Accepted
from tests.compatibility.page import COMMAND, table_of, wrapped

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verl-keys.md"
TEMPLATE = Path(__file__).with_suffix(".md")


def render() -> str:
    sections = []
    for prefix, rules in SECTIONS.items():
        text = [f"### `{prefix.rstrip('.')}`"]
        if prefix in SAME_AS:
            name = SAME_AS[prefix].rstrip(".")
            also = "Other keys" if rules else "Keys"
            text.append(f"{also} are those of [`policy.{name}`](compatibility.md).")
        if rules:
            text.append(table_of(_described(rules)))
        sections.append("\n\n".join(text))
    text = TEMPLATE.read_text(encoding="utf-8").format(command=COMMAND, keys="\n\n".join(sections))
    return "\n\n".join(wrapped(part) for part in text.split("\n\n")).rstrip() + "\n"


def _described(rules: Rules) -> dict[str, tuple[Rule, str]]:
    return {
        name: (rule, rule.note if isinstance(rule, Accepted) else "")
        for name, rule in rules.items()
    }


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
