"""Parses numbers of bytes as people write them; `estimate/sizes.py` formats them."""

from __future__ import annotations

import re

import typer

from megatron_policy.estimate.sizes import show_gib as show_gib
from megatron_policy.estimate.sizes import show_size as show_size

_DECIMAL, _BINARY = ("", "k", "m", "g", "t"), ("", "ki", "mi", "gi", "ti")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from "64MiB", "5GB" or "1048576"; a usage error listing the forms for anything else."""
    match = _SIZE.fullmatch(text.strip())
    prefix = match[2].lower() if match else "?"
    if match is None or prefix == "i":
        raise typer.BadParameter(f"{text!r} is not a size; write for example 64MiB, 5GB or 1048576")
    unit = 1000 ** _DECIMAL.index(prefix) if prefix in _DECIMAL else 1024 ** _BINARY.index(prefix)
    size = int(float(match[1]) * unit)
    if size < 1:
        raise typer.BadParameter(f"{text!r} is too small; it must be at least one byte")
    return size


def parse_gpu_memory(text: str) -> int:
    """As `parse_size`, of a GPU's memory; a usage error below 1 GiB, which is a unit left out."""
    size = parse_size(text)
    if size < 2**30:
        raise typer.BadParameter(f"{text} is {size} bytes, no GPU's memory; write {text}GiB")
    return size
