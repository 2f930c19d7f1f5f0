"""Reads and writes files at byte offsets, with few of them open at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Self

from megatron_policy.errors import ConversionError

from .contained import open_regular

MAX_OPEN = 64
"""A checkpoint can have more files than a process can have open."""
MAX_VIEWS = 1024
"""Buffers per system call: IOV_MAX of Linux."""


class RawFiles:
    """Files by path, absolute or below `root`; also created and written if `writable`.

    `root` can be set later, before the first file is used.
    ConversionError when a file cannot be read or ends too early, OSError when one cannot be
    written; both name the file.
    """

    def __init__(self, root: Path = Path(), writable: bool = False) -> None:
        self.root = root
        self._flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the byte views one after another from `offset` on."""
        try:
            for part in _batches(views):
                wanted = sum(map(len, part))
                got = os.preadv(self._handle(path), part, offset)
                while got < wanted:
                    rest = _after(part, got)
                    more = os.preadv(self._handle(path), rest, offset + got)
                    if not more:
                        raise ConversionError(
                            f"{path} is truncated: it ends after {offset + got} bytes, "
                            f"{wanted - got} bytes too early. Fetch or write the checkpoint again."
                        )
                    got += more
                offset += wanted
        except OSError as error:
            raise ConversionError(f"{path} cannot be read: {error.strerror}") from error

    def read_bytes(self, path: Path, offset: int, length: int) -> bytes:
        """The `length` bytes at `offset`, or fewer up to the end of the file."""
        try:
            return os.pread(self._handle(path), length, offset)
        except OSError as error:
            raise ConversionError(f"{path} cannot be read: {error.strerror}") from error

    def write(self, path: Path, offset: int, views: Sequence[memoryview]) -> None:
        """Write the byte views one after another from `offset` on."""
        try:
            for part in _batches(views):
                wanted, done = sum(map(len, part)), 0
                while done < wanted:
                    rest = _after(part, done) if done else part
                    done += os.pwritev(self._handle(path), rest, offset + done)
                offset += wanted
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.root / path)) from error

    def sync(self, paths: Iterable[Path]) -> None:
        """Wait until these files are on the disk."""
        for path in paths:
            try:
                os.fsync(self._handle(path))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.root / path)) from error

    def close(self) -> None:
        """Close all open files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _handle(self, path: Path) -> int:
        handle = self._open.get(path)
        if handle is None:
            handle = open_regular(self.root / path, self._flags)
            self._open[path] = handle
            if len(self._open) > MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(path)
        return handle


def _batches(views: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    if len(views) <= MAX_VIEWS:
        yield views
        return
    left = iter(views)
    while part := list(islice(left, MAX_VIEWS)):
        yield part


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """The rest of the views after their first `done` bytes."""
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest
