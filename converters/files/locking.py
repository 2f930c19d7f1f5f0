"""Tracks who uses a directory, with locks that end with the process that holds them.

All processes of one machine see a lock on a directory. Machines that share a file system do not
see each other's, so a directory's name says on which machine it was made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 60.0
"""The longest wait for another process that makes, publishes or removes something there."""
_LOOK_S = 0.01

LEFT_AFTER_S = 24 * 3600.0
"""A directory whose lock cannot show its use is considered abandoned if unchanged for this long."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MADE_ON = re.compile(r"\.partial-([0-9a-f]{8})-[0-9a-f]{12}$")


@contextlib.contextmanager
def locked(directory: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the directory's lock; False where the file system has none.

    BlockingIOError, naming the directory, if another process holds the lock and `wait` is false or
    the wait was too long.
    """
    end = time.monotonic() + (LOCK_TIMEOUT_S if wait else 0)
    held = True
    with opened(directory) as handle:
        try:
            while not _took(handle):
                if time.monotonic() > end:
                    raise BlockingIOError(
                        errno.EWOULDBLOCK,
                        "another process, which also saves there, keeps it locked",
                        str(directory),
                    )
                time.sleep(_LOOK_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            held = False
        yield held


def new_name(final: Path) -> Path:
    """A unique name next to `final`, for what will replace it."""
    return final.with_name(f".{final.name}.partial-{_machine()}-{uuid.uuid4().hex[:12]}")


def remove_left(partial: Path) -> None:
    """Remove a directory named by `new_name` if nobody writes in it any more.

    One in use stays; one of which that cannot be known stays, with a warning, until it has been
    unchanged for long.
    """
    with contextlib.suppress(OSError), locked(partial, wait=False) as held:
        if _is_left(partial, held):
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a file or directory, for reading."""
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def _is_left(partial: Path, held: bool) -> bool:
    """Whether its writer is gone; `held` is whether this process has its lock."""
    made_on = _MADE_ON.search(partial.name)
    if held and (made_on is None or made_on[1] == _machine()):
        return True
    paths = (Path(folder, name) for folder, _, names in os.walk(partial) for name in names)
    changed = max(path.lstat().st_mtime for path in (partial, *paths))
    if time.time() - changed > LEFT_AFTER_S:
        return True
    _log.warning(
        "%s was not removed: its writer may still be running, which cannot be checked from here. "
        "It is removed once unchanged for %g hours; remove it if that process has ended",
        partial,
        LEFT_AFTER_S / 3600,
    )
    return False


@cache
def _machine() -> str:
    """Eight hex digits for this boot of the machine: containers on it share its locks."""
    try:
        name = _BOOT.read_bytes()
    except OSError:
        name = os.uname().nodename.encode()
    return hashlib.blake2b(name, digest_size=4).hexdigest()


def _took(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
