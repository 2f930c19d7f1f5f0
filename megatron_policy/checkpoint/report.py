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


def check_host_data(value: Any) -> None:
    """ConfigError, naming the place, unless it is a mapping of values that can be read back
    unchanged without running code: numbers, strings, tensors, and lists, tuples and dicts of such.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"host_data is a {type(value).__name__}: give a dict of what to keep")
    _check_plain(dict(value), "host_data")


def _check_plain(value: Any, name: str) -> None:
    if type(value) in _PLAIN:
        return
    if type(value) in (list, tuple):
        for index, each in enumerate(value):
            _check_plain(each, f"{name}[{index}]")
        return
    if type(value) is dict:
        for key, each in value.items():
            if type(key) not in (str, int, bool, float):
                raise ConfigError(f"{name} has the key {key!r}: keys must be strings or numbers")
            _check_plain(each, f"{name}[{key!r}]")
        return
    raise ConfigError(
        f"{name} is a {type(value).__name__}; host_data can hold numbers, strings, tensors, and "
        "lists, tuples and dicts of such"
    )
