"""Decodes and encodes the header of a safetensors file.

A file is 8 bytes of header length, the header in JSON, then the bytes of the tensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import torch

from megatron_policy.converters.files.strict_json import parse

Shape = tuple[int, ...]

# All dtypes of the format whose elements torch can hold one by one. Of those left over, F4 and the
# two of F6 pack several elements into a byte.
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

MAX_DIMENSIONS = 64
"""The maximum for torch tensors."""

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class UnreadDtype(Exception):
    """A tensor of a whole file has a dtype that is not read: which tensor, and which dtype."""


class Extent(NamedTuple):
    """Where a tensor lies in its file: bytes from the file's start."""

    start: int
    dtype: torch.dtype
    shape: Shape

    @property
    def end(self) -> int:
        """The byte after the tensor's last."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def decode(file: BinaryIO, size: int) -> dict[str, Extent]:
    """The tensors of a file of `size` bytes. ValueError saying what is wrong with it, UnreadDtype
    for a tensor in a dtype that is not among those read.
    """
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
    if 8 + length > size:
        raise ValueError(f"it ends after {size} bytes, within its header")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes; the limit is {MAX_HEADER_BYTES}")
    try:
        entries = parse(file.read(length))
        entries.pop("__metadata__", None)
        extents = {name: _extent(name, entry, 8 + length, size) for name, entry in entries.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is unreadable: {error!r:.200}") from error
    at, before = 8 + length, "its header"
    for start, end, name in sorted(
        (e.start, e.end, n) for n, e in extents.items() if e.end > e.start
    ):
        if start < at:
            raise ValueError(f"{before} and {name} share bytes")
        if start > at:
            raise ValueError(f"{start - at} bytes before {name} belong to no tensor")
        at, before = end, name
    if at < size:
        raise ValueError(f"{size - at} bytes after {before} belong to no tensor")
    return extents


def _extent(name: str, entry: Mapping[str, Any], data: int, size: int) -> Extent:
    first, last = entry["data_offsets"]
    numbers = (first, last, *entry["shape"])
    if any(type(number) is not int for number in numbers):
        raise TypeError(f"shape and offsets of {name} are not whole numbers")
    if len(numbers) > 2 + MAX_DIMENSIONS or max(numbers) >= 2**63:
        raise ValueError(f"shape and offsets of {name} are not those of a tensor")
    if not isinstance(kind := entry["dtype"], str):
        raise TypeError(f"the dtype of {name} is not a name")
    if kind not in _DTYPES:
        raise UnreadDtype(f"{name} is in the dtype {kind:.40}, which is not read")
    extent = Extent(data + first, _DTYPES[kind], tuple(entry["shape"]))
    if min(numbers) < 0 or extent.end != data + last:
        raise ValueError(f"the offsets of {name} contradict its shape")
    if extent.end > size:
        raise ValueError(f"it ends after {size} bytes, before the end of {name}")
    return extent


def encode(inventory: Mapping[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, Extent]]:
    """The bytes before the tensors, and each tensor's place in the file (widest first, so
    aligned).
    """
    order = sorted(inventory, key=lambda name: (-inventory[name][0].itemsize, name))
    extents: dict[str, Extent] = {}
    end = 0
    for name in order:
        extents[name] = Extent(end, *inventory[name])
        end = extents[name].end
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (start, dtype, shape) in extents.items():
        offsets = [start, extents[name].end]
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    header = struct.pack("<Q", len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8)
    return header, {n: e._replace(start=e.start + len(header)) for n, e in extents.items()}
