"""Ends a run with one line where a package is missing, or ours refuses or fails to do something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from megatron_policy import ConfigError, ConversionError, RefitError, WorkerError

OF_DEMO = ("matplotlib", "ray")
"""Packages of the extra `demo`."""
EXPECTED = (ConfigError, ConversionError, PermissionError, RefitError, WorkerError)


@contextmanager
def exit_on_missing(console: Console) -> Iterator[None]:
    """Print which extra has a package that is not installed, and exit with status 2."""
    try:
        yield
    except ImportError as error:
        if error.name not in OF_DEMO:
            raise
        fix = 'pip install ".[demo]" brings all that the examples need'
        said = f"{error.name} is not installed: in the checkout, {fix}"
        console.print(f"[red]error:[/red] {escape(said)}", soft_wrap=True)
        raise typer.Exit(2) from error


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
