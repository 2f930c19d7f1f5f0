"""64-bit digests (xxh3) of tensors and of what stands around them in files; knows no formats.

Every byte of a file is covered once: a tensor's own by the tensor's digest, which is over its
elements in HF order and the same in every format, all others by the file's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash
from torch import Tensor

from megatron_policy.converters.raw_files import RawFiles
from megatron_policy.errors import ConversionError
from megatron_policy.formats.tensors import flat_bytes

STEP = 2**20

UNSEALED = "0" * 16
"""What stands for a text's own digest while that is computed."""


class Digest:
    """Takes bytes one after another."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, content: bytes | memoryview | Tensor) -> None:
        """Take the next bytes, or those of a contiguous tensor."""
        self._state.update(flat_bytes(content) if isinstance(content, Tensor) else content)

    def text(self) -> str:
        """The digest of all that was taken, in 16 hexadecimal digits."""
        return self._state.hexdigest()


def of_bytes(content: bytes) -> str:
    """The digest of these bytes."""
    return xxhash.xxh3_64_hexdigest(content)


def sealed(text: bytes) -> bytes:
    """The text with a digest of all of it where its first `UNSEALED` stands."""
    return text.replace(UNSEALED.encode(), of_bytes(text).encode(), 1)


def is_sealed(text: bytes, stated: str) -> bool:
    """Whether `stated`, the digest that stands in the text, is the one that `sealed` put there."""
    return of_bytes(text.replace(stated.encode(), UNSEALED.encode(), 1)) == stated


def of_file(files: RawFiles, path: Path, size: int, extents: Iterable[tuple[int, int]] = ()) -> str:
    """The digest of a file's bytes outside of `extents`, (first, end) each, that are tensors'."""
    digest = Digest()
    for begin, end in _gaps(size, sorted(extents)):
        for offset in range(begin, end, STEP):
            digest.update(files.read_bytes(path, offset, min(STEP, end - offset)))
    return digest.text()


def size_of(path: Path) -> int:
    """Bytes of a file; ConversionError when there is none."""
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error


def _gaps(size: int, extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    at = 0
    for begin, end in extents:
        if at < begin:
            yield at, begin
        at = max(at, end)
    if at < size:
        yield at, size
