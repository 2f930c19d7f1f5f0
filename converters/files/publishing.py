"""Directories that appear whole or not at all: written next to their final name, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from megatron_policy.errors import ConfigError, ExportError

from .contained import expanded, open_regular
from .locking import locked, new_name, opened, remove_left

_MARKS = (
    ("config.json", "*.safetensors"),
    ("metadata.json", ".metadata"),
    ("*.distcp",),
    ("checkpoint.json",),
    ("adapter_config.json", "*.safetensors"),
)
"""Files by which a checkpoint is recognised: of Hugging Face, of Megatron-Core, what is left of a
damaged one, or of PEFT. Other directories have none of them.
"""
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV)
"""Errors of kernels and file systems that cannot exchange two directories."""

_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # Linux: linux/fs.h and fcntl.h


class Staged:
    """Empty directories next to their final names, which they get when all are written, or never.

    Their names are unique: no other process writes in them, or removes them, while this one lives.
    What a killed process left behind under such names is removed.
    """

    def __init__(
        self, destinations: Sequence[str | os.PathLike[str]], overwrite: bool = False
    ) -> None:
        """ConfigError when a destination exists and must not be replaced."""
        self._finals = [_absolute(destination) for destination in destinations]
        assert len(set(self._finals)) == len(self._finals), self._finals
        self._overwrite, self._over = overwrite, False
        self._locks = contextlib.ExitStack()
        self.partials = tuple(new_name(final) for final in self._finals)
        """Where to write, in the order of the destinations."""
        parents = {parent for final in self._finals for parent in final.parents}
        missing = sorted((p for p in parents if not p.exists()), key=lambda p: -len(p.parts))
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
        self._made_parents = missing  # innermost first
        try:
            for parent in self._made_parents:
                flush_directory(parent.parent)
            for partial, final in zip(self.partials, self._finals, strict=True):
                with locked(final.parent):
                    # What killed processes left behind: a directory being replaced gets its name
                    # back.
                    _bring_back(_replaced(final))
                    for left in final.parent.glob(f".{glob.escape(final.name)}.partial-*"):
                        remove_left(left)
                    check_replaceable(final, overwrite)
                    partial.mkdir()
                    self._locks.enter_context(locked(partial))  # or until this process ends
        except BaseException:
            self.drop()
            raise

    def publish(self) -> None:
        """Give all of them their names, one after another; if one fails, none keeps its name.

        What they replace is removed only after all have their names. If the process is killed,
        what belongs together is still on the disk: of those not yet renamed, the old ones; of
        the others, the new ones under their names and the old ones next to them as `.NAME.*`.
        ConfigError if a destination has come to exist in the meantime and must not be replaced.
        """
        try:
            _publish_all(self.partials, self._finals, self._overwrite)
        except BaseException:
            self.drop()
            raise
        self._over = True
        self._locks.close()

    def drop(self) -> None:
        """Remove what was written; does nothing after `publish` or a first `drop`."""
        if self._over:
            return
        self._over = True
        _remove(*self.partials)
        self._locks.close()
        for parent in self._made_parents:
            with contextlib.suppress(OSError):  # others may use it by now
                parent.rmdir()


@contextlib.contextmanager
def new_directory(destination: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """An empty directory that is renamed to `destination` if the body succeeds, and removed if not.

    See `Staged`. If several run at once, the last to finish needs `overwrite`.
    """
    with new_directories([destination], overwrite) as (partial,):
        yield partial


@contextlib.contextmanager
def new_directories(
    destinations: Sequence[str | os.PathLike[str]], overwrite: bool = False
) -> Iterator[tuple[Path, ...]]:
    """Like `new_directory` for several; they get their names one after another, or none does."""
    staged = Staged(destinations, overwrite)
    try:
        yield staged.partials
    except BaseException:
        staged.drop()
        raise
    staged.publish()


def clean_leftovers(parent: str | Path, names: str = "iter_*", unless: str = "") -> None:
    """Remove what killed processes left in `parent` of directories with such names, except those
    that have a file `unless`.

    A directory that was being replaced gets its name back.
    """
    folder = _absolute(parent)
    if not folder.is_dir():
        return
    with locked(folder):
        for replaced in folder.glob(f".{names}.replaced"):
            _bring_back(replaced)
        for partial in folder.glob(f".{names}.partial-*"):
            if not (unless and (partial / unless).is_file()):
                remove_left(partial)


def check_replaceable(destination: str | Path, overwrite: bool) -> Path:
    """The absolute destination if it is free, empty, or a checkpoint that may be replaced."""
    final = _absolute(destination)
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return final
    if any(final.glob("iter_*")):
        raise ConfigError(f"{final} holds training checkpoints (iter_*); choose another path")
    if not is_checkpoint(final):
        raise ConfigError(f"{final} exists and is not a checkpoint; choose another path")
    if not overwrite:
        raise ConfigError(f"{final} exists; choose another path, or replace it: overwrite=True")
    return final


def is_checkpoint(path: Path) -> bool:
    """Whether a directory has the files by which a checkpoint is recognised."""
    return any(all(any(path.glob(name)) for name in marks) for marks in _MARKS)


def check_room(final: Path, needed: int) -> None:
    """ExportError unless the file system of `final` has that many bytes left."""
    there, free = _room(final)
    if free < needed:
        raise ExportError(
            f"{final} needs {needed:,} bytes, but {there} has {free:,} left: free "
            f"{needed - free:,} bytes there, or choose another path"
        )


def not_written(final: Path, error: OSError, needed: int) -> ExportError:
    """The error for a directory of `needed` bytes of which a file could not be written."""
    where = f" ({error.filename})" if error.filename not in (None, str(final)) else ""
    said = f"{final} cannot be written: {error.strerror or error}{where}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        there, free = _room(final)
        said += (
            f"; it takes {needed:,} bytes, and {there} has {free:,} left: make room, or choose "
            "another path"
        )
    return ExportError(said)


def _room(final: Path) -> tuple[Path, int]:
    """The nearest directory above `final` that exists, and the bytes that its file system has
    left.
    """
    there = next(parent for parent in final.parents if parent.exists())
    return there, shutil.disk_usage(there).free


def write_file(path: Path, content: bytes, *, wait: bool = True) -> None:
    """Write a file and, if `wait`, wait until it is on the disk; OSError names it on failure."""
    with naming(path), path.open("wb") as file:
        file.write(content)
        if wait:
            flush(file)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the operating system in this context name the file, which a write alone does not
    know.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file and wait until the copy is on the disk; OSError names the copy if it
    cannot be written.
    """
    handle = open_regular(source)
    with os.fdopen(handle, "rb") as content, naming(target), target.open("wb") as file:
        shutil.copyfileobj(content, file)
        flush(file)


def flush(file: IO[bytes]) -> None:
    """Wait until the file's content is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    """Wait until the directory's entries are on the disk."""
    with opened(directory) as handle:
        os.fsync(handle)


def _absolute(destination: str | os.PathLike[str]) -> Path:
    """The absolute path with links resolved, so that the target is replaced and not the link."""
    final = Path(os.path.realpath(expanded(destination)))
    if final.is_symlink():
        raise ConfigError(f"{final} is a link that leads back to itself; choose another path")
    return final


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def _publish_all(partials: Iterable[Path], finals: Iterable[Path], overwrite: bool) -> None:
    """Give all directories their names; if one fails, undo the others."""
    done: list[tuple[Path, Path, Path | None]] = []
    try:
        for partial, final in zip(partials, finals, strict=True):
            with locked(final.parent):
                check_replaceable(final, overwrite)
                for folder, _, _ in os.walk(partial):
                    flush_directory(Path(folder))
                done.append((partial, final, put(partial, final, _replaced(final))))
                flush_directory(final.parent)
    except BaseException:
        for partial, final, old in reversed(done):
            take_back(partial, final, old)
        raise
    for partial, final, old in done:
        if old is not None:
            _remove_replaced(old, partial, final)


def _remove_replaced(old: Path, partial: Path, final: Path) -> None:
    """Remove what `final` was until now; `partial` is a name of our own again."""
    if old != partial:  # other processes use this name for the same purpose
        with locked(final.parent):
            if not (final.exists() and old.exists()):
                return
            old.rename(partial)
    _remove(partial)


def _remove(*directories: Path) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _bring_back(replaced: Path) -> None:
    """Give what was moved aside its name back, unless its replacement already has that name."""
    final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
    if final.exists():
        _remove(replaced)
    elif replaced.exists():
        replaced.rename(final)


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
