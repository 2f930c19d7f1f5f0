"""What a command leaves the shell with when it cannot finish: one line, and a code."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from megatron_policy.cli.output import say

FAILED, MISUNDERSTOOD, INTERRUPTED = 1, 2, 130
SHOWN_ITEMS = 5
"""Of a message that lists what is off, so that it stays a line."""
SHOWN_CHARACTERS = 4000
"""Of a line: names in it are as long as whoever made them liked."""


@contextmanager
def one_line_errors(code: int = FAILED) -> Iterator[None]:
    """End the command with `error: ...` on stderr, and `code`, for every error that a user can
    cause.

    Other errors are mistakes of this package and keep their traceback.
    """
    from megatron_policy import errors

    ours = (
        errors.BatchError,
        errors.CheckpointError,
        errors.ConfigError,
        errors.ConversionError,
        errors.ExportError,
        errors.WorkerError,
    )
    _quiet_libraries()
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("error: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise  # whoever read our output has seen enough
    except MemoryError as error:
        fail(f"out of memory {error}".strip(), code)
    except (*ours, OSError) as error:
        fail(str(error), code)


def _quiet_libraries() -> None:
    """What a user has to know is told by this package: others' advice would hide it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # for when it is imported
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def fail(message: str, code: int = FAILED) -> NoReturn:
    """Say what is wrong and leave."""
    say(f"error: {one_line(message)}", err=True)
    raise typer.Exit(code)


def one_line(message: str) -> str:
    """A message of several lines as one: of the indented ones, which are a list, the first few."""
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
