"""Reads the values of a manifest; ValueError, saying what is wrong, for others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_policy.converters.files import contained
from megatron_policy.dtypes import dtype_named

_DIGEST = re.compile(r"[0-9a-f]{16}", re.ASCII)


def entries(content: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    """The entries of the JSON object of that name."""
    found = content[name]
    if not isinstance(found, dict):
        raise ValueError(f"its {name} are not a JSON object")
    return found.items()


def form(dtype: str, shape: list[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor."""
    return dtype_named(dtype), tuple(map(count, shape))


def count(value: Any) -> int:
    """A number from 0."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a number, found {value!r:.40}")
    return value


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"expected a text, found {value!r:.40}")
    return value


def xxh3(value: Any) -> str:
    """A digest as 16 hexadecimal digits."""
    if _DIGEST.fullmatch(text(value)) is None:
        raise ValueError(f"expected a digest, found {value!r:.40}")
    return str(value)


def inside(root: Path, name: str) -> str:
    """Return the name, if the file is in or below the directory, and no link leads out of it."""
    contained.inside(root, name)
    return name
