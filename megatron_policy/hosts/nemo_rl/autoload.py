"""Installs our worker when NeMo RL is imported, if the environment asks for it.

`megatron_policy_nemo_rl.pth` makes every Python that starts with NEMO_RL_MEGATRON_BACKEND set call
`watch`, so this module imports nothing that is not already loaded in such a Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE = "NEMO_RL_MEGATRON_BACKEND"
KNOWN = ("megatron_policy",)
GROUPS = "nemo_rl.distributed.worker_groups"
"""NeMo RL's module that starts workers: a process that has not imported it starts none."""


def watch() -> None:
    """Act on the variable once NeMo RL is imported: install, or warn about an unknown value."""
    asked = os.environ.get(VARIABLE)
    # Python may run the .pth lines twice: their folder can have two names.
    if asked and not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport(GROUPS, _install if asked in KNOWN else _warn))


class AfterImport:
    """A finder that finds nothing itself, and calls `act` once the module `name` is imported.

    Exceptions of `act` propagate from the import.
    """

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What later finders find for that module, with `act` called after its execution."""
        if name != self.name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        finders = (finder for finder in behind if hasattr(finder, "find_spec"))
        spec = next(filter(None, (f.find_spec(name, path, target) for f in finders)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == self.name:  # a loader may also load other modules
                    self.act()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    from megatron_policy.hosts.nemo_rl import install

    install()


def _warn() -> None:
    print(
        f"{VARIABLE}={os.environ.get(VARIABLE)!r} is not known to megatron-policy, which leaves "
        f"NeMo RL as it is; known: {', '.join(KNOWN)}",
        file=sys.stderr,
    )
