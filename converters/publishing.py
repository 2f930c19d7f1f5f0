"""Directories that appear whole or not at all: written beside their final name, then renamed.

Knows nothing of what is in them but the file by which a checkpoint is told from other things.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from megatron_policy.errors import ConfigError

from .contained import expanded
from .renaming import put, take_back

_MARKS = (
    ("config.json", "*.safetensors"),
    ("metadata.json", ".metadata"),
    ("*.distcp",),
    ("checkpoint.json",),
)
"""What a checkpoint has, of Hugging Face, of Megatron-Core, or one of those that was damaged since;
others' directories have none of them.
"""

LOCK_TIMEOUT_S = 60.0
"""The longest wait for another process that makes, publishes or removes something beside."""
_LOOK_S = 0.01

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems answer that know no locks."""


def partial_dir(destination: str | Path) -> Path:
    """Where an export to `destination` is written: beside it, on the same file system."""
    final = _absolute(destination)
    return final.with_name(f".{final.name}.partial")


def stage(destination: str | Path, overwrite: bool = False) -> Path:
    """Make an empty `partial_dir` and return it; for one rank to call, before any writes.

    ConfigError when `destination` exists and may not be replaced.
    """
    check_replaceable(destination, overwrite)
    partial = partial_dir(destination)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, destination: str | Path, overwrite: bool = False) -> None:
    """Give the fully written directory its final name; for one rank to call, after all wrote.

    What it replaces is there until the moment it is, where the file system can exchange two names.
    """
    final = check_replaceable(destination, overwrite)
    _flush_directories(partial)
    old = put(partial, final, _replaced(final))
    flush_directory(final.parent)
    _remove(old)


@contextlib.contextmanager
def new_directory(destination: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """An empty directory that gets the name `destination` if the body succeeds, and goes if not.

    One that a killed process left behind is removed; those of running ones are left alone: each has
    its own, and the last to finish needs `overwrite`. ConfigError as for `stage`.
    """
    with new_directories([destination], overwrite) as (partial,):
        yield partial


@contextlib.contextmanager
def new_directories(
    destinations: Sequence[str | Path], overwrite: bool = False
) -> Iterator[tuple[Path, ...]]:
    """Several as `new_directory`, that get their names one after another, or none of them does.

    What they replace is removed when all have their names, so that what belongs together is on the
    disk at any moment: of those that a process was killed before, the old ones; of the others the
    new ones under their names, and the old ones beside them as `.NAME.*`.
    """
    finals = [_absolute(destination) for destination in destinations]
    assert len(set(finals)) == len(finals), finals
    number = uuid.uuid4().hex[:12]
    partials = tuple(final.with_name(f".{final.name}.partial-{number}") for final in finals)
    made_parents = _make_parents(finals)
    with contextlib.ExitStack() as held:
        try:
            for parent in made_parents:
                flush_directory(parent.parent)
            for partial, final in zip(partials, finals, strict=True):
                with locked(final.parent):
                    _clean_up(final)
                    check_replaceable(final, overwrite)
                    partial.mkdir()
                    held.enter_context(locked(partial))  # until this process ends, however it does
            yield partials
            _publish_all(partials, finals, overwrite)
        except BaseException:
            _remove(*partials)
            for parent in made_parents:
                with contextlib.suppress(OSError):  # others may use it by now
                    parent.rmdir()
            raise


def clean_leftovers(parent: str | Path, names: str = "iter_*", unless: str = "") -> None:
    """Remove what killed processes left in `parent` of directories with such names, except those
    that have a file `unless`.

    A directory that one of them was replacing comes back.
    """
    folder = _absolute(parent)
    if not folder.is_dir():
        return
    with locked(folder):
        for replaced in folder.glob(f".{names}.replaced"):
            _bring_back(replaced)
        for partial in folder.glob(f".{names}.partial-*"):
            if not (unless and (partial / unless).is_file()):
                _remove_unused(partial)


def check_replaceable(destination: str | Path, overwrite: bool) -> Path:
    """The absolute destination, if it is free, empty, or a checkpoint that may be replaced."""
    final = _absolute(destination)
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return final
    if not any(all(any(final.glob(name)) for name in marks) for marks in _MARKS):
        raise ConfigError(f"{final} exists and is no checkpoint; choose another path")
    if not overwrite:
        raise ConfigError(
            f"{final} exists; choose another path, or replace it: --overwrite, or overwrite=True"
        )
    return final


def write_file(path: Path, content: bytes, *, wait: bool = True) -> None:
    """Write a file, and `wait` until it is on the disk; OSError with its name if that fails."""
    try:
        with path.open("wb") as file:
            file.write(content)
            if wait:
                flush(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def flush(file: IO[bytes]) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    """Wait until the directory's entries are on the disk."""
    with _opened(directory) as handle:
        os.fsync(handle)


def _flush_directories(root: Path) -> None:
    for directory, _, _ in os.walk(root):
        flush_directory(Path(directory))


def _absolute(destination: str | Path) -> Path:
    """The path in full; where it is a link, what that leads to, so that the link stays one."""
    final = Path(os.path.realpath(expanded(destination)))
    if final.is_symlink():
        raise ConfigError(f"{final} is a link that leads back to itself; choose another path")
    return final


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def _make_parents(finals: Iterable[Path]) -> list[Path]:
    """Make the missing parents of `finals`, and return them, innermost first."""
    parents = {parent for final in finals for parent in final.parents}
    missing = sorted((p for p in parents if not p.exists()), key=lambda p: len(p.parts))
    for parent in missing:
        parent.mkdir(exist_ok=True)
    return missing[::-1]


def _publish_all(partials: Iterable[Path], finals: Iterable[Path], overwrite: bool) -> None:
    """Give all directories their names; if one cannot have it, the others lose theirs again."""
    done: list[tuple[Path, Path, Path | None]] = []
    try:
        for partial, final in zip(partials, finals, strict=True):
            with locked(final.parent):
                check_replaceable(final, overwrite)
                _flush_directories(partial)
                done.append((partial, final, put(partial, final, _replaced(final))))
                flush_directory(final.parent)
    except BaseException:
        for partial, final, old in reversed(done):
            take_back(partial, final, old)
        raise
    _remove(*(old for _, _, old in done))


def _remove(*directories: Path | None) -> None:
    for directory in directories:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _clean_up(final: Path) -> None:
    """Remove what killed processes left behind; a directory they were replacing comes back."""
    _bring_back(_replaced(final))
    for partial in final.parent.glob(f".{glob.escape(final.name)}.partial-*"):
        _remove_unused(partial)


def _bring_back(replaced: Path) -> None:
    """Give what was moved aside its name again, unless what replaces it has that by now."""
    final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
    if final.exists():
        _remove(replaced)
    elif replaced.exists():
        replaced.rename(final)


def _remove_unused(partial: Path) -> None:
    # In use, or somebody else's: it is not in the way.
    with contextlib.suppress(OSError), locked(partial, wait=False):
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def locked(directory: Path, wait: bool = True) -> Iterator[None]:
    """Hold the directory's lock; BlockingIOError, naming it, if another process has it and we do
    not `wait`, or have waited long.
    """
    with _opened(directory) as handle:
        end = time.monotonic() + (LOCK_TIMEOUT_S if wait else 0)
        try:
            while not _took(handle):
                if time.monotonic() > end:
                    raise BlockingIOError(
                        errno.EWOULDBLOCK,
                        "another process, which saves there too, does not let go of it",
                        str(directory),
                    )
                time.sleep(_LOOK_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if not wait:  # nobody can tell whether somebody still needs the directory
                raise BlockingIOError(error.errno, "no locks on this file system") from error
        yield


def _took(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    handle = os.open(directory, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
