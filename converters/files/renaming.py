"""Gives a directory the name of another one, atomically where the system can exchange two names."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV)
"""Errors of kernels and file systems that cannot exchange two directories."""

_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # Linux: linux/fs.h and fcntl.h


def put(partial: Path, final: Path, aside: Path) -> Path | None:
    """Give `partial` its final name, and return the name that what it replaces has now.

    That is `partial`, or `aside` where names cannot be exchanged: then nothing has the final name
    for a moment.
    """
    if not final.exists():
        partial.rename(final)
        return None
    if exchanged(partial, final):
        return partial
    shutil.rmtree(aside, ignore_errors=True)
    final.rename(aside)
    partial.rename(final)
    return aside


def take_back(partial: Path, final: Path, old: Path | None) -> None:
    """Undo a `put` that returned `old`."""
    if old == partial:
        exchanged(partial, final)
        return
    final.rename(partial)
    if old is not None:
        old.rename(final)


def exchanged(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False if the system cannot, OSError if it fails."""
    exchange = _renameat2()
    if exchange is None:
        return False
    if exchange(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@cache
def _renameat2() -> Any:
    """The C library's function of that name; None if it has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        folder, name = ctypes.c_int, ctypes.c_char_p
        function.argtypes = (folder, name, folder, name, ctypes.c_uint)
    return function
