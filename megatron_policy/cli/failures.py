"""How a command that cannot finish exits: one line on stderr, and a code."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from megatron_policy.cli.output import say, say_json

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
