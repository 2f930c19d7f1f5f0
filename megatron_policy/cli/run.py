"""`megatron-policy run`: runs a framework's program that starts this package's workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from megatron_policy.cli.report import INTERRUPTED, fail

# Everything after the program belongs to the program, even if it looks like our option.
AS_PYTHON = {"allow_interspersed_args": False}


def run(
    program: Annotated[
        str | None,
        typer.Argument(metavar="PROGRAM", help="A script; after -m, a module.", show_default=False),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments for the program.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module's name.")] = False,
    host: Annotated[
        str,
        typer.Option(
            help="The framework that starts this package's workers: nemo_rl, ray (this package's "
            "own driver), or one that an installed package registers. verl needs no host: "
            "docs/verl.md."
        ),
    ] = "nemo_rl",
    workers: Annotated[
        str | None,
        typer.Option(
            help="Which workers of NeMo RL are replaced: megatron, or all, with which "
            "policy.dtensor_cfg gets this package's worker too."
        ),
    ] = None,
) -> None:
    """Run a framework's program, such as NeMo RL's run_grpo.py, with this package's workers.

    The program runs as `python [-m] PROGRAM [ARGS]...` would run it, and its exit code is this
    command's.
    """
    from megatron_policy.errors import ConfigError
    from megatron_policy.hosts import launch
    from megatron_policy.interfaces.host import find_host

    if workers is not None and host != "nemo_rl":
        raise typer.BadParameter(f"--workers is for --host nemo_rl; leave it out with {host!r}")
    try:
        if workers is not None:
            from megatron_policy.hosts.nemo_rl import redirect

            redirect.choose_workers(workers)
            os.environ[redirect.WORKERS_VARIABLE] = workers  # for the whole process
        found = find_host(host)
        if program is None:
            raise ConfigError(
                "name a script, or a module after -m, as in `megatron-policy run "
                "examples/run_grpo.py --config FILE`"
            )
        wanted = launch.Program(program, tuple(arguments or ()), module)
        launch.find(wanted)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        found.install()
    except ConfigError as error:
        fail(str(error))
    with _ended_by_python():
        launch.run(wanted)


@contextmanager
def _ended_by_python() -> Iterator[None]:
    """Report what the program leaves uncaught as Python does, not as a bug in a command."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        interrupted = isinstance(error, KeyboardInterrupt)
        raise SystemExit(INTERRUPTED if interrupted else 1) from None
