"""Leak-free host memory shared by two processes: an unnamed file, gone with its last user."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from megatron_policy.errors import RefitError

DIRECTORY = "/dev/shm"
_REACH = (
    "Trainer and engine must run at the same time, on the same machine, as the same user and with "
    "the same process numbers (in one container, or with --pid=host); send the weights again"
)


@dataclass(frozen=True)
class Handle:
    """Where another process of the same user on the same machine finds the memory.

    `started` is when the owner started, in clock ticks since boot, and `inode` the inode of the
    file: they detect that the process or descriptor number has been reused.
    """

    pid: int
    started: int
    fd: int
    inode: int
    nbytes: int


class SharedMemory:
    """`nbytes` bytes mapped here; in their owner also open as the descriptor `fd`."""

    def __init__(self, mapping: mmap.mmap, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        self._mapping: mmap.mmap | None = mapping
        self._fd = fd

    def tensor(self) -> Tensor:
        """A new view of all of it, flat uint8; it keeps the memory mapped."""
        assert self._mapping is not None, "it is closed"
        # Through numpy: its array prevents the mapping from being closed while in use.
        return torch.from_numpy(numpy.frombuffer(self._mapping, numpy.uint8, self.nbytes))

    def handle(self) -> Handle:
        """A handle for another process; valid until `close`."""
        assert self._fd is not None, "it is closed, or somebody else's"
        pid = os.getpid()
        return Handle(pid, _started(pid), self._fd, os.fstat(self._fd).st_ino, self.nbytes)

    def close(self) -> bool:
        """Release it: nobody can open it afterwards, and the owner's pages are freed.

        Returns whether it is unmapped; it stays mapped while a tensor still views it.
        """
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        if self._mapping is None:
            return True
        try:
            self._mapping.close()
        except BufferError:
            if fd is not None:
                with contextlib.suppress(OSError):  # not every file system supports it
                    self._mapping.madvise(mmap.MADV_REMOVE)  # readers in either process see zeros
            return False
        self._mapping = None
        return True

    def __del__(self) -> None:
        self.close()


def create(nbytes: int, directory: str = DIRECTORY) -> SharedMemory:
    """Allocate memory, all of it backed by pages of the file system at `directory`.

    RefitError if there is not enough, now rather than as a SIGBUS when it is written.
    """
    size = max(1, nbytes)
    try:
        fd = _unnamed_file(directory)
        try:
            os.posix_fallocate(fd, 0, size)
            mapping = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise RefitError(
            f"the trainer cannot get {nbytes:,} bytes of shared memory: {error.strerror} "
            f"({_free(directory)} free in {directory}). Give the refit a smaller buffer, or the "
            "machine more of this memory (for a container: --shm-size)"
        ) from error
    mapping.madvise(mmap.MADV_DONTFORK)  # or a forked process would keep it
    return SharedMemory(mapping, nbytes, fd)


def attach(handle: Handle) -> SharedMemory:
    """Open another process's memory, copy-on-write.

    RefitError if the owner is gone, has released it, or cannot be reached.
    """
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(handle, os.fstat(fd))
            mapping = mmap.mmap(fd, max(1, handle.nbytes), mmap.MAP_PRIVATE)
        finally:
            os.close(fd)
    except OSError as error:
        raise RefitError(
            f"the engine cannot open shared memory of process {handle.pid}: {error.strerror}. "
            + _REACH
        ) from error
    return SharedMemory(mapping, handle.nbytes)


def rebuilt(
    pid: int, started: int, fd: int, inode: int, nbytes: int, dtype: torch.dtype, index: int
) -> Tensor:
    """Another process's memory as flat elements of `dtype`, mapped as long as that tensor lives.

    `index` is where the host's receivers put the number of their GPU; it is not used here.
    """
    return attach(Handle(pid, started, fd, inode, nbytes)).tensor().view(dtype)


def _check(handle: Handle, found: os.stat_result) -> None:
    same = stat.S_ISREG(found.st_mode) and found.st_ino == handle.inode
    if not same or found.st_size < handle.nbytes or _started(handle.pid) != handle.started:
        raise RefitError(
            f"process {handle.pid} has released the shared memory, or is a different one by now. "
            + _REACH
        )


def _started(pid: int) -> int:
    """When a process started, in clock ticks since boot (proc_pid_stat(5), field 22)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _unnamed_file(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        if not os.path.isdir(directory):
            raise
        return os.memfd_create("refit")  # the file system does not support unnamed files


def _free(directory: str) -> str:
    try:
        found = os.statvfs(directory)
    except OSError:
        return "nothing"
    return f"{found.f_bavail * found.f_frsize:,} bytes"
