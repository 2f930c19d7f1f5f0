"""What the host of this process offers, found by trying imports, not by version numbers, and its
types.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any


def import_part(module: str, name: str) -> Any:
    """`name` of the host's `module`; ImportError saying what is missing."""
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise ImportError(f"{module} has no {name}", name=module)
    return getattr(found, name)


def find_part(module: str, name: str) -> Any:
    """The same; None if there is no host or it has no such part. ImportError if it has the part but
    a dependency is not installed: the part must then not be taken for missing.
    """
    try:
        return import_part(module, name)
    except ImportError as error:
        missing = error.name or module
        if f"{module}.".startswith(f"{missing}."):
            return None
        raise ImportError(
            f"{module} of this host cannot be imported: {error}. Install what it needs into "
            f"{sys.executable}",
            name=missing,
        ) from error


def select_accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those `options` that `function` accepts: hosts add arguments from version to version."""
    known = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
        return dict(options)
    return {name: value for name, value in options.items() if name in known}


def to_host_batch(data: Any) -> Any:
    """The same rows as the host's own batch type, whose methods its code may call; unchanged
    without a host. Tensors are shared, a microbatch plan is dropped.
    """
    kind = find_part("nemo_rl.distributed.batched_data_dict", "BatchedDataDict")
    return data if kind is None else kind(dict(data))


def rename_result(found: Mapping[str, Any]) -> dict[str, Any]:
    """A `TrainResult` under the host's names."""
    names = {"loss": "global_loss", "microbatch_metrics": "all_mb_metrics"}
    return {names.get(key, key): value for key, value in found.items()}
