"""A file system that is full soon; for tests of what happens then."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 2**20


@contextmanager
def small_disk(path: Path) -> Iterator[str]:
    """1 MiB of memory, mounted at `path`; skips the test where that is not allowed."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield str(path)
    finally:
        subprocess.run(["umount", str(path)], check=True)


def free(directory: str) -> int:
    """Bytes that a file system has left."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
