"""Progress of a transfer: a bar on a terminal, and a summary line at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from megatron_policy.estimate.sizes import show_size

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
