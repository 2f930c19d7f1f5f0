"""Prints lines on the terminal, where names in them can be untrusted and always print as text, JSON
documents, and the progress of a transfer.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from megatron_policy.estimate.sizes import show_size

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


Tell = Callable[[int, int], None]


@contextmanager
def transfer(what: str) -> Iterator[Tell]:
    """Yield a callback for bytes done and in total; reports on stderr, the bar only on a
    terminal.
    """
    started, last = time.monotonic(), 0

    def remember(done: int, total: int) -> None:
        nonlocal last
        last = done

    if sys.stderr.isatty():
        with _bar(what) as show:

            def tell(done: int, total: int) -> None:
                remember(done, total)
                show(done, total)

            yield tell
    else:
        yield remember
    seconds = time.monotonic() - started
    rate = show_size(last / seconds) if seconds else "?"
    typer.echo(f"{what}: {show_size(last)} in {seconds:.1f} s, {rate}/s", err=True)


@contextmanager
def _bar(what: str) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
