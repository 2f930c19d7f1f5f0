"""Prints lines on the terminal; names in them can be untrusted, and always print as text."""

from __future__ import annotations

import typer

CONFIG_ONLY = "only config.json was read: the tensors are those that its model has"


def say(line: str, err: bool = False) -> None:
    """Print a line."""
    typer.echo(printable(line), err=err)


def printable(text: str) -> str:
    """The text with escapes for what would control a terminal, or has no form in UTF-8."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
