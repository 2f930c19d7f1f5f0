"""Ends a run with one line where the package refuses something, or could not do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from megatron_policy import ConfigError, ConversionError, RefitError, WorkerError

EXPECTED = (ConfigError, ConversionError, PermissionError, RefitError, WorkerError)


@contextmanager
def exit_on_errors(console: Console) -> Iterator[None]:
    """Print an expected error and exit with status 2; that of a worker's code is raised, with the
    rank's own traceback.
    """
    try:
        yield
    except EXPECTED as error:
        if isinstance(error, WorkerError) and error.cause:
            raise
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from error
