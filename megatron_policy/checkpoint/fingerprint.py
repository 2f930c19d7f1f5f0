"""Fingerprints of a model and of the versions that write a checkpoint."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from importlib.metadata import version
from platform import python_version
from typing import Any

import torch

from megatron_policy.formats.digests import of_bytes
from megatron_policy.version import VERSION


def digest_of(architecture: Any) -> str:
    """A digest of a model's architecture, a (nested) dataclass, without fields at their default
    and those that do not count when two of them are compared.

    So a field that a later version adds with a default does not change the digest.
    """
    return of_bytes(json.dumps(_plain(architecture), sort_keys=True).encode())


def current_versions() -> dict[str, str]:
    """Versions of this package and of what it writes checkpoints with."""
    return {
        "megatron_policy": VERSION,
        "megatron_core": version("megatron-core"),
        "torch": str(torch.__version__),
        "python": python_version(),
    }


def _plain(value: Any) -> Any:
    """`value` as JSON values, the same in all processes and versions of Python."""
    if dataclasses.is_dataclass(value):
        return {
            part.name: _plain(getattr(value, part.name))
            for part in dataclasses.fields(value)
            if part.compare and getattr(value, part.name) != _default(part)
        }
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    assert value is None or isinstance(value, (bool, int, float, str)), value
    return value


def _default(part: dataclasses.Field[Any]) -> Any:
    if part.default_factory is not dataclasses.MISSING:
        return part.default_factory()
    return part.default
