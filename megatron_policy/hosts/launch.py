"""Runs a program as Python would, from within another program."""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType

from megatron_policy.errors import ConfigError


@dataclass(frozen=True)
class Program:
    """The part after `python` of a command line: `[-m] target arguments...`."""

    target: str
    arguments: tuple[str, ...]
    is_module: bool = False

    @classmethod
    def parse(cls, words: Sequence[str]) -> Program:
        """Parse a command line; ConfigError if `words` name no program."""
        is_module = words[:1] == ["-m"]
        rest = words[1:] if is_module else words
        if not rest or (rest[0].startswith("-") and not is_module):
            raise ConfigError("name a script, or a module after -m")
        return cls(rest[0], tuple(rest[1:]), is_module)


def find(program: Program) -> None:
    """Set this process's import path and arguments for the program; ConfigError if not found."""
    if not program.is_module and not os.path.exists(program.target):
        raise ConfigError(f"there is no script {program.target!r} in {os.getcwd()}")
    if not program.is_module and program.target.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{program.target} is a configuration, not a script: give the host's script, and the "
            f"configuration to that, as in `examples/run_grpo.py --config {program.target}`"
        )
    sys.argv[:] = [program.target, *program.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = _path_entry(program)
    if program.is_module:
        try:
            found = importlib.util.find_spec(program.target)
        except ModuleNotFoundError:  # of a parent
            found = None
        if found is None:
            raise ConfigError(
                f"there is no module {program.target!r} on the import path of {sys.executable}"
            )


def run(program: Program) -> None:
    """Run a program that was found, as `__main__`; its exceptions propagate, even SystemExit."""
    if not sys.flags.safe_path:
        # Modules imported since may have put entries before it.
        sys.path.remove(_path_entry(program))
        sys.path.insert(0, _path_entry(program))
    if program.is_module:
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(program.target) or zipfile.is_zipfile(program.target):
        runpy.run_path(os.path.abspath(program.target), run_name="__main__")
    else:
        # Unlike with `runpy`, `__main__` stays in place for exit handlers.
        path = os.path.abspath(program.target)
        loader = SourceFileLoader("__main__", path)
        main = ModuleType("__main__")
        vars(main).update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
        code = loader.source_to_code(loader.get_data(path), path)
        sys.modules["__main__"] = main
        exec(code, vars(main))


def _path_entry(program: Program) -> str:
    """What Python puts first on its import path."""
    if program.is_module:
        return os.getcwd()
    # runpy itself puts a folder or an archive first.
    return os.path.dirname(os.path.realpath(program.target))
