"""The command line; heavy imports stay inside the commands, so that help is fast. Read
`convert.py` first: the other commands have the same form.
"""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_policy.cli.convert import convert
from megatron_policy.cli.inspect import inspect, inspect_config
from megatron_policy.cli.parity import parity
from megatron_policy.cli.plan import plan
from megatron_policy.cli.run import AS_PYTHON, run
from megatron_policy.cli.verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="megatron-policy",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain text: an error stays one searchable line, and help needs no extra import.
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        from megatron_policy import __version__

        typer.echo(f"megatron-policy {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Megatron-Core policies for reinforcement learning, from and to Hugging Face checkpoints.

    Exit codes: 0 all is well, 1 what was found is wrong, 2 what was asked for cannot be.
    """


app.command("convert")(convert)
app.command("inspect")(inspect)
app.command("verify")(verify)
app.command("parity")(parity)
app.command("plan")(plan)
app.command("inspect-config")(inspect_config)
app.command("run", context_settings=AS_PYTHON)(run)
