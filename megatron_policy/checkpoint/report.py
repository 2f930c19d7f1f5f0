"""What a save and a load report to their caller, and what host data a caller can give to a save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_policy.errors import ConfigError

_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor)


@dataclass(frozen=True)
class SaveReport:
    """What a save has written."""

    step: int
    """Optimizer steps taken before the save."""
    total_bytes: int
    """Of all files, of all ranks."""
    seconds: float
    """From the call until all ranks knew that the checkpoint was complete."""

    @property
    def bytes_per_second(self) -> float:
        return self.total_bytes / self.seconds


@dataclass(frozen=True)
class LoadReport:
    """What a load has restored."""

    path: str
    """The directory of the checkpoint that was loaded."""
    step: int
    """Optimizer steps taken before the save."""
    restored: tuple[str, ...]
    not_restored: Mapping[str, str]
    """What was not restored, and why."""
    host_data: Mapping[str, Any]
    """What the caller gave to the save."""

    def __str__(self) -> str:
        """The report, one line for each part."""
        lines = [f"{self.path}, step {self.step}: restored {', '.join(self.restored)}"]
        lines += [f"  not restored: {what} ({why})" for what, why in self.not_restored.items()]
        return "\n".join(lines)


def check_host_data(value: Any, name: str = "host_data") -> None:
    """ConfigError, naming the place, for values that cannot be read back unchanged without running
    code: all but numbers, strings, tensors, and lists, tuples and dicts of such.
    """
    if type(value) in _PLAIN:
        return
    if type(value) in (list, tuple):
        for index, each in enumerate(value):
            check_host_data(each, f"{name}[{index}]")
        return
    if isinstance(value, Mapping) and (type(value) is dict or name == "host_data"):
        for key, each in value.items():
            if type(key) not in (str, int, bool, float):
                raise ConfigError(f"{name} has the key {key!r}: keys must be strings or numbers")
            check_host_data(each, f"{name}[{key!r}]")
        return
    raise ConfigError(
        f"{name} is a {type(value).__name__}; host_data can hold numbers, strings, tensors, and "
        "lists, tuples and dicts of such"
    )
