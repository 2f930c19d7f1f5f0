"""64-bit digests (xxh3) of tensors and of the other bytes of their files.

Every byte of a file is covered once: a tensor's bytes by the tensor's digest, which covers its
elements in HF order and is the same in every format, all other bytes by the file's digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import xxhash
from torch import Tensor

from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.errors import ConversionError
from megatron_policy.formats.tensors import flat_bytes

STEP = 2**20

UNSEALED = "0" * 16
"""Placeholder for a text's own digest while that is computed."""


class Digest:
    """An incremental digest."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, content: bytes | memoryview | Tensor) -> None:
        """Add the next bytes, or those of a contiguous tensor."""
        self._state.update(flat_bytes(content) if isinstance(content, Tensor) else content)

    def text(self) -> str:
        """The digest of all bytes so far, as 16 hexadecimal digits."""
        return self._state.hexdigest()


def digest_bytes(content: bytes) -> str:
    """The digest of these bytes."""
    return xxhash.xxh3_64_hexdigest(content)


def seal(text: bytes) -> bytes:
    """The text with its first `UNSEALED` replaced by a digest of the whole text."""
    return text.replace(UNSEALED.encode(), digest_bytes(text).encode(), 1)


def is_sealed(text: bytes, stated: str) -> bool:
    """Whether `stated`, the digest in the text, is the one that `seal` put there."""
    return digest_bytes(text.replace(stated.encode(), UNSEALED.encode(), 1)) == stated


def digest_file(
    files: RawFiles, path: Path, size: int, extents: Iterable[tuple[int, int]] = ()
) -> str:
    """The digest of a file's bytes outside the tensors' `extents`, (first, end) each."""
    gaps, at = [], 0
    for begin, end in [*sorted(extents), (size, size)]:
        if at < begin:
            gaps.append((at, begin))
        at = max(at, end)
    return digest_spans(files, path, gaps)


def digest_spans(files: RawFiles, path: Path, spans: Iterable[tuple[int, int]]) -> str:
    """The digest of those bytes of a file, (first, end) each."""
    digest = Digest()
    for begin, end in spans:
        for offset in range(begin, end, STEP):
            digest.update(files.read_bytes(path, offset, min(STEP, end - offset)))
    return digest.text()


def find_size(path: Path) -> int:
    """Size of a file in bytes; ConversionError if it cannot be read."""
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error
