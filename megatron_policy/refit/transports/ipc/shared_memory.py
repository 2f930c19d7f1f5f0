"""Memory that a trainer exports to an engine on the same machine: of the GPU, or leak-free memory
of the host, an unnamed file, gone with its last user.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_policy import device
from megatron_policy.device import shared as on_gpu
from megatron_policy.errors import RefitError
from megatron_policy.refit.buffers import Buffer, align

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
        return Handle(pid, _read_start(pid), self._fd, os.fstat(self._fd).st_ino, self.nbytes)

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


def create(nbytes: int, directory: str = DIRECTORY, who: str = "the trainer") -> SharedMemory:
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
            f"{who} cannot get {nbytes:,} bytes of shared memory: {error.strerror} "
            f"({_free(directory)} free in {directory}). Give the refit a smaller buffer, or the "
            "machine more of this memory (for a container: --shm-size)"
        ) from error
    mapping.madvise(mmap.MADV_DONTFORK)  # or a forked process would keep it
    return SharedMemory(mapping, nbytes, fd)


def attach(handle: Handle, who: str = "the engine", *, writable: bool = False) -> SharedMemory:
    """Open another process's memory: copy-on-write, or `writable`, so that the owner sees it.

    RefitError if the owner is gone, has released it, or cannot be reached.
    """
    try:
        mode = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", mode | os.O_CLOEXEC)
        try:
            _check(handle, os.fstat(fd))
            kind = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
            mapping = mmap.mmap(fd, max(1, handle.nbytes), kind)
        finally:
            os.close(fd)
    except OSError as error:
        raise RefitError(
            f"{who} cannot open shared memory of process {handle.pid}: {error.strerror}. " + _REACH
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
    if not same or found.st_size < handle.nbytes or _read_start(handle.pid) != handle.started:
        raise RefitError(
            f"process {handle.pid} has released the shared memory, or is a different one by now. "
            + _REACH
        )


def _read_start(pid: int) -> int:
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


Rebuild = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A function and its arguments that open the memory in another process; the seventh argument is
the number of the GPU there."""

GLOBALS = on_gpu.GLOBALS | {
    (Handle.__module__, Handle.__qualname__),
    (rebuilt.__module__, rebuilt.__qualname__),
}
"""What a pickled handle names besides dtypes: (module, name)."""


class ExportedBuffer:
    """A buffer of this process that another process can open."""

    def __init__(self, nbytes: int, where: torch.device, directory: str = DIRECTORY) -> None:
        """Allocate it at once, on `where`. RefitError if there is not enough memory."""
        size = align(max(1, nbytes))
        self._host: SharedMemory | None = None
        if where.type == "cpu":
            self._host = create(size, directory)
            self.buffer = Buffer(self._host.tensor())
        else:
            self.buffer = Buffer.on(where, size)

    def handle(self) -> object:
        """A handle for `open_exported`, on a GPU also for the host's receivers; for single use."""
        if self._host is not None:
            return self._host.handle()
        return _share(self.buffer.memory)[1:]

    def rebuild(self, dtype: torch.dtype) -> Rebuild:
        """The same as flat elements of `dtype`, to be called by the receiver."""
        if self._host is None:
            return _share(self.buffer.typed(dtype))
        h = self._host.handle()
        return rebuilt, (h.pid, h.started, h.fd, h.inode, h.nbytes, dtype, 0)

    def close(self) -> None:
        """Release it; nobody can open it any more."""
        # The buffer may still be referenced, for instance by the traceback of an error.
        self.buffer.forget()
        if self._host is not None:
            self._host.close()


def _share(tensor: Tensor) -> Rebuild:
    try:
        return on_gpu.share(tensor)
    except RuntimeError as error:
        raise RefitError(f"the trainer cannot share its GPU memory: {error}") from error


def open_exported(handle: object, consume: Callable[[Tensor], None]) -> None:
    """Call `consume` with the trainer's memory, flat uint8, which is released when it returns.

    RefitError if it cannot be opened, or if a tensor of it is still held afterwards.
    """
    if isinstance(handle, Handle):
        attached = attach(handle)
        try:
            consume(attached.tensor())
        except BaseException as error:
            _forget_locals(error)
            attached.close()
            raise
        if not attached.close():
            raise RefitError(
                "the engine holds on to memory that it was given to load, which the trainer will "
                "overwrite. `load` must copy what it keeps"
            )
        return
    try:
        consume(_opened_on_gpu(handle))
    except BaseException as error:
        _forget_locals(error)
        raise
    finally:
        device.synchronize()  # the trainer overwrites it as soon as it has the reply


def _opened_on_gpu(handle: Any) -> Tensor:
    try:
        return on_gpu.open_tensor(handle[0])
    except (RuntimeError, TypeError, IndexError) as error:
        raise RefitError(
            f"the engine cannot open the trainer's GPU memory: {error}. Both must use the same "
            "GPU of the same machine"
        ) from error


def _forget_locals(error: BaseException | None) -> None:
    """Clear the locals in an error's tracebacks: it may be kept, the trainer's memory must not."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def read_handle(rebuild: Any) -> object:
    """The handle for `open_exported` in a `Rebuild`; RefitError for any other function."""
    try:
        function, arguments = rebuild
        known = (function.__module__, function.__qualname__) in GLOBALS
    except (TypeError, ValueError, AttributeError) as error:
        raise RefitError(f"this is not a handle of weights: {error}") from error
    if not known:
        raise RefitError(f"a handle of weights asks to call {function}, which is refused")
    return Handle(*arguments[:5]) if function is rebuilt else (arguments,)


def make_rebuild(handle: Any, dtype: torch.dtype) -> Rebuild:
    """The inverse of `read_handle`, of memory that holds that dtype."""
    if isinstance(handle, Handle):
        return rebuilt, (*astuple(handle), dtype, 0)
    return on_gpu.rebuild_function(), tuple(handle[0])
