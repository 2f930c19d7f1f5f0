"""Whether messages that the pages show are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST = 16
"""Characters without which a template says nothing."""


Template = tuple[str, ...]
"""The words of a string in the code, between the gaps where values are put in."""


def templates_in(code: str) -> Iterator[Template]:
    """The strings of a module, f-strings as wholes."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            inside.update(map(id, node.values))
            words = [str(each.value) for each in node.values if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.Constant) and id(node) not in inside:
            words = [str(node.value)]
        else:
            continue
        template = tuple(stripped for each in words if (stripped := each.strip()))
        if _length(template) >= LEAST:
            yield template


def _length(template: Template) -> int:
    return sum(map(len, template))


def _is_in(template: Template, message: str) -> bool:
    """Whether the message has all words of the template, in order."""
    end = 0
    for words in template:
        start = message.find(words, end)
        if start < 0:
            return False
        end = start + len(words)
    return True


@cache
def templates() -> tuple[Template, ...]:
    """Those of the whole package."""
    folders = (ROOT / "megatron_policy", ROOT / "converters")
    files = (file for folder in folders for file in sorted(folder.rglob("*.py")))
    return tuple(each for file in files for each in templates_in(file.read_text(encoding="utf-8")))


def share_of(message: str) -> float:
    """The largest share of a message that is words of one template, in which it is found."""
    found = (_length(each) for each in templates() if _is_in(each, message))
    return max(found, default=0) / len(message)


def messages_of(page: str) -> list[str]:
    """The messages that a page shows: its blocks of text."""
    return [
        text.strip() for text in re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ]
