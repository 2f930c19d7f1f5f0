"""The command line, called in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from megatron_policy.cli import app


def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """What a command exits with, and what it says on stdout and on stderr. No traceback."""
    result = CliRunner().invoke(app, [str(each) for each in arguments], env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr
