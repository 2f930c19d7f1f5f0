"""What commands find, printed as lines and tables, or as one document of JSON; and how one that
cannot finish exits: one line on stderr, and a code.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from megatron_policy.cli.output import say, say_json

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_policy.parallel.topology import Topology

FAILED, MISUNDERSTOOD, INTERRUPTED = 1, 2, 130
"""What was found is wrong or broke; what was asked for cannot be; somebody stopped it."""
SHOWN_ITEMS = 5
"""Items shown of a message that lists problems, so that it stays one line."""
SHOWN_CHARACTERS = 4000
"""Limit for a line: the names in it can have any length."""


@contextmanager
def one_line_errors(as_json: bool = False) -> Iterator[None]:
    """End the command with `error: ...` on stderr, and a code, for every error a user can cause;
    `as_json` also with a document on stdout.

    The code follows from the error, whatever the command: a ConfigError is of what was asked for,
    as is a package that it would take; the others are of what was found. Other errors are bugs in
    this package and keep their traceback.
    """
    from megatron_policy import errors

    asked = (errors.ConfigError, errors.MissingPackageError)
    found = (
        errors.BatchError,
        errors.CheckpointError,
        errors.ConversionError,
        errors.ExportError,
        errors.RefitError,
        errors.WorkerError,
    )
    # This package reports what a user has to know: libraries' advice would hide it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # for when it is imported
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED, as_json)
    except BrokenPipeError:
        raise  # the reader of our output closed it
    except MemoryError as error:
        fail(f"out of memory {error}".strip(), FAILED, as_json)
    except asked as error:
        fail(str(error), MISUNDERSTOOD, as_json)
    except (*found, OSError) as error:
        fail(str(error), FAILED, as_json)


def fail(message: str, code: int = FAILED, as_json: bool = False) -> NoReturn:
    """Print the error and exit; `as_json` also prints it as a document on stdout, which has to be
    the only one.
    """
    text = one_line(message)
    if as_json:
        say_json({"error": text, "exit_code": code})
    say(f"error: {text}", err=True)
    raise typer.Exit(code)


def one_line(message: str) -> str:
    """A multi-line message as one line; of its indented lines, which form a list, the first few."""
    kept: list[str] = []
    items = hidden = 0
    for line in [*filter(str.strip, message.splitlines()), ""]:
        if line.startswith(" "):
            items += 1
            if items > SHOWN_ITEMS:
                hidden += 1
                continue
        elif hidden:
            kept.append(f"and {hidden} more")
            items = hidden = 0
        kept.append(" ".join(line.split()))
    text = kept[0]
    for part in filter(None, kept[1:]):
        text += f" {part}" if text.endswith((":", ".", ";", ",")) else f"; {part}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


_UNFOLDED = 10_000
"""Columns of a table that is not shown in a terminal: names in it must not be cut."""


@dataclass(frozen=True)
class CommandReport:
    """What a command found: `data` makes the document, `parts` are the same for people, and `error`
    says what is wrong with it, if anything is.
    """

    data: Callable[[], Any]
    parts: Iterable[str | Table]
    error: str | None = None


def show(report: CommandReport, as_json: bool) -> None:
    """Print a report; one with an error ends the command."""
    if as_json:
        say_json(report.data())
    for part in () if as_json else report.parts:
        if isinstance(part, str):
            say(part)
            continue
        from rich.console import Console

        width = None if sys.stdout.isatty() else _UNFOLDED
        Console(highlight=False, width=width).print(part)
    if report.error is not None:
        fail(report.error)


def layout_data(topology: Topology) -> dict[str, int]:
    """The sizes of all axes, for JSON."""
    sizes = {axis: getattr(topology, axis) for axis in ("tp", "cp", "ep", "dp", "pp", "vpp")}
    return sizes | {"etp": topology.expert_tp}
