"""An architecture as JSON values, for digests of it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """`value` as JSON values, the same in all processes and versions of Python: dataclasses without
    fields at their default and those that do not count when two of them are compared.
    """
    if dataclasses.is_dataclass(value):
        return {
            part.name: plain(getattr(value, part.name))
            for part in dataclasses.fields(value)
            if part.compare and getattr(value, part.name) != _default(part)
        }
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    assert value is None or isinstance(value, (bool, int, float, str)), value
    return value


def _default(part: dataclasses.Field[Any]) -> Any:
    if part.default_factory is not dataclasses.MISSING:
        return part.default_factory()
    return part.default
