"""What commands find, printed as lines and tables, or as one document of JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_policy.cli.failures import fail
from megatron_policy.cli.output import say, say_json

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_policy.parallel.topology import Topology

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
