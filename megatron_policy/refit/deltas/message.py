"""What one rank sends of a delta: the fragments of Hugging Face tensors that it has changed, as
bytes.

A message begins with `MAGIC` and the length of its header, 8 bytes each. The header is JSON and
describes the fragments; their contents follow, one after another. Its digest is stated elsewhere:
in the chain of which it is a part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_policy.converters.rows.regions import Region
from megatron_policy.dtypes import name_dtype
from megatron_policy.errors import RefitError
from megatron_policy.formats.manifest import count, form, text, xxh3
from megatron_policy.refit.deltas.arrays import Positions
from megatron_policy.refit.deltas.codec import Change, Encoded, decode

MAGIC = b"MPDELTA3"
_FORMATS = MAGIC[:-1]  # with which the messages of all versions begin
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Fragment:
    """What has changed of one rank's part of a tensor: of the elements of its `regions`, one after
    another. `digest` is the sum of all of them (`arrays.py`), as they are afterwards, in 16
    hexadecimal digits.
    """

    tensor: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    encoded: Encoded
    digest: str

    @property
    def elements(self) -> int:
        """The number of elements, changed or not."""
        return sum(region.elements for region in self.regions)

    def decode(self) -> Iterator[Change]:
        """What has changed, by positions among all elements; see `decode`."""
        return decode(self.encoded, self.elements, self.dtype.itemsize)

    def locate(self, positions: Positions) -> Positions:
        """The flat indices in the tensor of those elements, which are in order."""
        if len(self.regions) == 1 and self.regions[0].stride == (1,):
            return positions + self.regions[0].offset
        first, found = 0, []
        for region in self.regions:
            low, high = np.searchsorted(positions, (first, first + region.elements))
            index = np.unravel_index(positions[low:high] - first, region.size)
            found.append(region.flat([np.asarray(at, np.int64) for at in index]))
            first += region.elements
        return np.concatenate(found)


def encode_message(fragments: Sequence[Fragment]) -> bytes:
    """The bytes of a message."""
    header = json.dumps(
        [
            {
                "tensor": f.tensor,
                "dtype": name_dtype(f.dtype),
                "shape": f.shape,
                "regions": f.regions,
                "encoding": f.encoded.encoding,
                "changes": f.encoded.changes,
                "bytes": len(f.encoded.content),
                "digest": f.digest,
            }
            for f in fragments
        ],
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()
    contents = (f.encoded.content for f in fragments)
    return b"".join((MAGIC, len(header).to_bytes(_LENGTH_BYTES, "little"), header, *contents))


def decode_message(content: bytes) -> tuple[Fragment, ...]:
    """The inverse of `encode_message`, without decoding what has changed. RefitError for anything
    else.
    """
    if content[: len(MAGIC)] != MAGIC and content.startswith(_FORMATS):
        raise RefitError(
            f"a message of changed weights is of format {content[: len(MAGIC)]!r}, but this "
            f"version reads {MAGIC!r}: use the same version of megatron-policy on both sides"
        )
    try:
        return tuple(_read(content))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise RefitError(f"a message of changed weights cannot be read: {error}") from error


def _read(content: bytes) -> Iterator[Fragment]:
    at = len(MAGIC) + _LENGTH_BYTES
    if content[: len(MAGIC)] != MAGIC:
        raise ValueError(f"it begins with {content[: len(MAGIC)]!r}")
    length = int.from_bytes(content[len(MAGIC) : at], "little")
    if length > len(content) - at:
        raise ValueError("it ends in its header")
    header, at = json.loads(content[at : at + length]), at + length
    for fields in header:
        size = count(fields["bytes"])
        if size > len(content) - at:
            raise ValueError("it ends before its last fragment")
        dtype, shape = form(fields["dtype"], fields["shape"])
        regions = tuple(_region(region, math.prod(shape)) for region in fields["regions"])
        changed = Encoded(
            text(fields["encoding"]), count(fields["changes"]), content[at : at + size]
        )
        yield Fragment(
            text(fields["tensor"]), dtype, shape, regions, changed, xxh3(fields["digest"])
        )
        at += size
    if at != len(content):
        raise ValueError(f"{len(content) - at} bytes are left over")


def _region(fields: list[Any], elements: int) -> Region:
    size, stride, offset = fields
    region = Region(tuple(map(count, size)), tuple(map(count, stride)), count(offset))
    fits = len(region.size) == len(region.stride) > 0 < region.elements
    if not fits or 0 in region.stride or region.ends[1] >= elements:
        raise ValueError(f"region {fields!r:.80} is not in a tensor of {elements} elements")
    return region
