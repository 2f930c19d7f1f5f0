"""Fingerprints of a model and of the versions that write a checkpoint."""

from __future__ import annotations

import json
from importlib.metadata import version
from platform import python_version
from typing import Any

import torch

from megatron_policy.converters.architecture.plain_values import plain
from megatron_policy.formats.digests import of_bytes
from megatron_policy.version import VERSION


def digest_of(architecture: Any) -> str:
    """A digest of a model's architecture, a (nested) dataclass, without fields at their default
    and those that do not count when two of them are compared.

    So a field that a later version adds with a default does not change the digest.
    """
    return of_bytes(json.dumps(plain(architecture), sort_keys=True).encode())


def current_versions() -> dict[str, str]:
    """Versions of this package and of what it writes checkpoints with."""
    return {
        "megatron_policy": VERSION,
        "megatron_core": version("megatron-core"),
        "torch": str(torch.__version__),
        "python": python_version(),
    }
