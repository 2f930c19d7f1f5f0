"""One tensor's record in a `.distcp` file: torch's zip archive around the bytes of the tensor."""

from __future__ import annotations

import io
import sys
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.errors import ConversionError


class Framing(NamedTuple):
    """The bytes before and after a tensor's own bytes in its record."""

    prefix: bytes
    suffix: bytes


@lru_cache(maxsize=4096)
def framing(dtype: torch.dtype, shape: Shape) -> Framing:
    """What `torch.save` puts around the bytes of a contiguous tensor."""
    holes = _Holes()
    with torch.serialization.skip_data():
        # The tensor's memory is never touched.
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], holes))
    (start, prefix), *rest = holes.merged()
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    assert start == 0 and len(rest) <= 1, [(at, len(part)) for at, part in holes.merged()]
    if rest:
        assert rest[0][0] == len(prefix) + nbytes
        return Framing(prefix, rest[0][1])
    data = _data_offset(io.BytesIO(prefix))  # no bytes were skipped: the tensor is empty
    return Framing(prefix[:data], prefix[data:])


@lru_cache(maxsize=1)
def empty_object() -> bytes:
    """The record of an object that holds nothing, as Megatron-Core writes it."""
    made = io.BytesIO()
    torch.save([None], made)
    return made.getvalue()


def data_offset(
    files: RawFiles, path: Path, offset: int, length: int, dtype: torch.dtype, shape: Shape
) -> int:
    """Where in the file the bytes of the tensor start whose record is at `offset`.

    ConversionError unless the record is a contiguous tensor of that dtype and shape.
    """
    expected = framing(dtype, shape)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if length == len(expected.prefix) + nbytes + len(expected.suffix):
        found = files.read_bytes(path, offset, len(expected.prefix))
        if found == expected.prefix:
            return offset + len(found)
    try:
        record = _Window(files, path, offset, length)
        start = _data_offset(io.BufferedReader(record, 4096))
        record.seek(0)
        with torch.serialization.skip_data():
            tensor = torch.load(io.BufferedReader(record, 4096), weights_only=True)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"it holds a {type(tensor).__name__}")
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise ValueError(f"it holds {list(tensor.shape)} {tensor.dtype}")
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            raise ValueError("it holds part of a larger tensor")
        return offset + start
    except ConversionError:
        raise
    except Exception as error:  # a damaged archive or pickle can raise anything
        raise ConversionError(
            f"{path}: the record at byte {offset} is damaged, or is not {list(shape)} {dtype}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error


def _data_offset(record: Any) -> int:
    """Where in a seekable record the bytes of its only tensor start."""
    with zipfile.ZipFile(record) as archive:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        order = members.get("byteorder")
        if order is not None and archive.read(order).decode() != sys.byteorder:
            raise ValueError("its bytes are in another order than this machine's")
        data = members["data/0"]
        if data.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed")
    record.seek(data.header_offset + 26)
    name, extra = (int.from_bytes(record.read(2), "little") for _ in range(2))
    return data.header_offset + 30 + name + extra


class _Holes(io.RawIOBase):
    """A writable stream that keeps what is written, at any offset; skipped ranges take nothing."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, bytes]] = []
        self._at = 0

    def write(self, content: Any, /) -> int:
        self._parts.append((self._at, bytes(content)))
        self._at += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        assert whence in (io.SEEK_SET, io.SEEK_CUR)
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def merged(self) -> list[tuple[int, bytes]]:
        """What was written, as (offset, bytes) of contiguous parts."""
        merged: list[tuple[int, bytes]] = []
        for at, part in self._parts:
            if merged and merged[-1][0] + len(merged[-1][1]) == at:
                merged[-1] = (merged[-1][0], merged[-1][1] + part)
            else:
                merged.append((at, part))
        return merged


class _Window(io.RawIOBase):
    """Part of a file as a readable file of its own."""

    def __init__(self, files: RawFiles, path: Path, offset: int, length: int) -> None:
        self._files, self._path = files, path
        self._offset, self._length, self._at = offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        wanted = min(len(buffer), max(0, self._length - self._at))
        content = self._files.read_bytes(self._path, self._offset + self._at, wanted)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
