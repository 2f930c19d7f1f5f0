"""Import paths of the last release that have changed; each still works, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PACKAGE = "megatron_policy"
_FAMILIES = (
    *("cohere", "deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "granite"),
    *("llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("smollm3", "starcoder2"),
)
RENAMED = {
    "conversion": "convert",
    **{f"converters.{name}": f"converters.families.{name}" for name in _FAMILIES},
    "converters.blocks": "converters.rows.blocks",
    "converters.dense": "converters.families.shared.dense",
    "converters.expert_rows": "converters.rows.expert_rows",
    "converters.experts": "converters.families.shared.experts",
    "converters.joined_rows": "converters.rows.kinds",
    "converters.mla": "converters.families.shared.mla",
    "converters.norm_rows": "converters.families.shared.norm_rows",
    "converters.rope_fields": "converters.config_fields.rope_fields",
    "converters.rotary": "converters.architecture.rotary",
    "converters.traits": "converters.architecture.traits",
    "hosts.registry": "interfaces.host",
    "layout": "config.layout",
    "refit.collective": "refit.transports.collective.transport",
    "refit.collective_receiving": "refit.receive.collective",
    "refit.disk": "refit.transports.disk",
    "refit.ipc_handles": "refit.transports.ipc.handles",
    "refit.ipc_stream": "refit.transports.ipc.transport",
    "refit.receiver": "refit.receive.receiver",
    "rendezvous": "coordination.rendezvous",
    "topology": "parallel.topology",
    "train": "training",
    "train.logprobs": "lm_head.logprobs",
}
"""From the old path, below the package, to the new one; will be removed in the next release."""


class RenamedModules(MetaPathFinder, Loader):
    """Finds modules by the paths of `RENAMED`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that stands in for the one at the new path."""
        package, _, old = fullname.partition(".")
        if package != PACKAGE or old not in RENAMED:
            return None
        return ModuleSpec(fullname, self, is_package=any(n.startswith(f"{old}.") for n in RENAMED))

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with the contents of the new one."""
        new = f"{PACKAGE}.{RENAMED[module.__name__.partition('.')[2]]}"
        warnings.warn(
            f"{module.__name__} has moved to {new}: import it from there. The old path "
            "will be removed in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        found = importlib.import_module(new)
        for name, value in vars(found).items():
            if not (name.startswith("__") and name.endswith("__")):
                setattr(module, name, value)
        # What the new module itself has under a name of the last release.
        module.__dict__["__getattr__"] = lambda name: getattr(found, name)


def renamed_name(module: str, name: str, names: Mapping[str, str]) -> Any:
    """What a module's `__getattr__` returns for a name of the last release; `names` has where each
    is now, as "module:name". AttributeError for other names.
    """
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, new = names[name].partition(":")
    warnings.warn(
        f"{module}.{name} is {home}.{new} now: import that. The old name will be removed "
        "in the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    return getattr(importlib.import_module(home), new)


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller of a method or attribute of the last release that it is `new` now."""
    warnings.warn(
        f"{old} is `{new}` now. The old name will be removed in the next release",
        DeprecationWarning,
        stacklevel=3,
    )


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function so that it takes its argument `new` also by the keyword `old` of the
    last release, with a warning. TypeError if a call has both.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(
                        f"{function.__qualname__} got both `{old}` and `{new}`, which are the same "
                        f"argument: give `{new}` only"
                    )
                warn_renamed(f"the argument `{old}` of {function.__qualname__}", new)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def install() -> None:
    """Make the old paths importable.

    Comes before all other finders, since an upgrade in place can leave folders with the old names.
    """
    if not any(isinstance(finder, RenamedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedModules())
