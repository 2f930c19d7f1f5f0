"""The commands of docs/reference/commands.md: their usage, arguments and options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from typer.main import get_command

from megatron_policy.cli import app
from tests.site.settings import table

NAME = "megatron-policy"
KINDS = {int: "N", float: "NUMBER", Path: "PATH"}


def sections() -> str:
    """Every command: what it does, how it is called, a row for each argument and option."""
    group = get_command(app)
    commands: dict[str, Any] = group.commands  # type: ignore[attr-defined]
    return "\n\n".join(
        part for name, command in sorted(commands.items()) for part in _section(name, command)
    )


def _section(name: str, command: Any) -> Iterator[str]:
    shown = command.params
    arguments = [each for each in shown if each.param_type_name == "argument"]
    options = [each for each in shown if each.param_type_name == "option"]
    yield f"## `{name}`"
    words = [NAME, name, *(["[OPTIONS]"] if options else []), *map(_placeholder, arguments)]
    yield f"```text\n{' '.join(words)}\n```"
    yield inspect.cleandoc(command.help or "")
    rows = [
        (f"`{_metavar(each)}`", "required" if each.required else "", _help(each))
        for each in arguments
    ]
    rows += [(f"`{_flags(each)}`", _default(each), _help(each)) for each in options]
    yield table(("argument or option", "default", "what it is"), rows)


def _placeholder(argument: Any) -> str:
    return _metavar(argument) if argument.required else f"[{_metavar(argument)}]"


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _flags(option: Any) -> str:
    flags = ", ".join(option.opts)
    return flags if option.is_flag else f"{flags} {option.metavar or _kind(option)}"


def _kind(option: Any) -> str:
    """What an option without a placeholder of its own takes: a type's name, or legal values."""
    kind = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return "|".join(each.value for each in kind)
    return KINDS.get(kind, "VALUE")


def _help(parameter: Any) -> str:
    return " ".join((parameter.help or "").split())


def _default(option: Any) -> str:
    value = option.default.value if isinstance(option.default, Enum) else option.default
    if option.required:
        return "required"
    return "" if value is None or value is False else f"`{value}`"
