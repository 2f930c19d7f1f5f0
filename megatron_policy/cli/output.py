"""Prints lines on the terminal, where names in them can be untrusted and always print as text, and
JSON documents.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import typer

CONFIG_ONLY = "only config.json was read: the tensors are those that its model has"


def say(line: str, err: bool = False) -> None:
    """Print a line. A terminal gets one that is wider in several, broken between words and indented
    below the first; a file or a pipe gets it whole.
    """
    text = printable(line)
    if (sys.stderr if err else sys.stdout).isatty():
        width = shutil.get_terminal_size().columns
        below = " " * (len(text) - len(text.lstrip()) + 4)
        if 2 * len(below) < width < len(text):
            text = textwrap.fill(
                text,
                width,
                subsequent_indent=below,
                break_long_words=False,
                break_on_hyphens=False,
            )
    typer.echo(text, err=err)


def printable(text: str) -> str:
    """The text with escapes for what would control a terminal, or has no form in UTF-8."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def say_json(document: Any) -> None:
    """Print a document of JSON. A number that is not finite is null: JSON has none; what JSON has
    no form for, such as a path, is a string.
    """
    typer.echo(json.dumps(_finite(document), indent=1, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
