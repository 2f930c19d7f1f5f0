"""Where a chain of deltas is published: a directory, or the objects below a URL of a store.

Names are relative and have slashes. A file is new or, the manifest alone, replaced as a whole; a
reader sees all of it or none.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import fsspec

from megatron_policy.converters.files.contained import expanded, inside
from megatron_policy.converters.files.publishing import (
    flush_directory,
    not_written,
    write_file,
)
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.extras import require

_log = logging.getLogger(__name__)

_S3 = ("s3", "s3a")


class Folder(Protocol):
    """What a chain needs of a place."""

    def locate(self, name: str) -> str:
        """Where that is, in words."""

    def prepare(self) -> None:
        """Make it ready for a first file. ConfigError if that cannot be."""

    def list_files(self) -> dict[str, list[str]]:
        """The names of the files in each folder that has some; "" is the place itself."""

    def read(self, name: str) -> bytes:
        """The content of a file. FileNotFoundError if it is not there, RefitError or OSError if it
        cannot be read.
        """

    def write(self, name: str, content: bytes) -> None:
        """Write a new file, in a folder that exists or is the only one below that which does
        not.
        """

    def replace(self, name: str, content: bytes, beside: str) -> None:
        """Write a file in place of another; `beside` is a folder that exists."""

    def keep_only(self, kept: Collection[str]) -> None:
        """Remove all in folders but these files and folders in them, as far as that is possible."""


class Directory:
    """A directory of this machine, or one that machines share."""

    def __init__(self, root: Path) -> None:
        """`root` need not exist."""
        self.root = root

    def locate(self, name: str) -> str:
        """The path."""
        return str(self.root / name)

    def prepare(self) -> None:
        """Make the directory."""
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"{self.root} is no directory: give one")
        self.root.mkdir(parents=True, exist_ok=True)

    def list_files(self) -> dict[str, list[str]]:
        """See `Folder`."""
        return {
            folder.removeprefix(str(self.root)).lstrip("/"): names
            for folder, _, names in os.walk(self.root)
            if names
        }

    def read(self, name: str) -> bytes:
        """See `Folder`."""
        return (self.root / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Wait until it is on the disk. RefitError, and nothing is left of it, if that fails."""
        path = self.root / name
        try:
            path.parent.mkdir(exist_ok=True)
            write_file(path, content)
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            raise RefitError(str(not_written(path, error, len(content)))) from error

    def replace(self, name: str, content: bytes, beside: str) -> None:
        """Write it in the folder `beside`, and rename it."""
        self.write(f"{beside}/{name}", content)
        (self.root / beside / name).replace(self.root / name)
        flush_directory(self.root)

    def keep_only(self, kept: Collection[str]) -> None:
        """See `Folder`; folders that become empty go too."""
        for folder in filter(Path.is_dir, self.root.iterdir()):
            for path in folder.iterdir():
                if path.relative_to(self.root).as_posix() in kept:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):
                        path.unlink()
            with suppress(OSError):  # it is not empty
                folder.rmdir()


class ObjectFolder:
    """The objects below a URL of a store, as fsspec reads and writes them. A store has no folders,
    and no renames: what is written is there as a whole or not at all.
    """

    def __init__(self, url: str) -> None:
        """Credentials and addresses are those of the store's own package and of fsspec's settings.
        ConfigError for a URL of no such store.
        """
        self.url = url if url.endswith("://") else url.rstrip("/")
        if url.startswith(tuple(f"{scheme}://" for scheme in _S3)):
            require("s3fs")
        try:
            self._store, root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{url} cannot be opened: {error}") from error
        self._root = root.rstrip("/")
        if not self._root.strip("/"):
            raise ConfigError(f"{url} has no name below which to publish: give it one")

    def locate(self, name: str) -> str:
        """The URL."""
        return f"{self.url}/{name}"

    def prepare(self) -> None:
        """Nothing is needed."""

    def list_files(self) -> dict[str, list[str]]:
        """See `Folder`."""
        found: dict[str, list[str]] = {}
        for name in self._list():
            folder, _, file = name.rpartition("/")
            found.setdefault(folder, []).append(file)
        return found

    def read(self, name: str) -> bytes:
        """See `Folder`."""
        with self._translating(name, "read", but=FileNotFoundError):
            content: bytes = self._store.cat_file(self._place(name))
        return content

    def write(self, name: str, content: bytes) -> None:
        """See `Folder`."""
        with self._translating(name, "written"):
            self._store.pipe_file(self._place(name), content)

    def replace(self, name: str, content: bytes, beside: str) -> None:
        """See `Folder`; a store replaces objects whole."""
        self.write(name, content)

    def keep_only(self, kept: Collection[str]) -> None:
        """See `Folder`."""
        try:
            others = [
                self._place(name)
                for name in self._list()
                if "/" in name and name not in kept and name.rpartition("/")[0] not in kept
            ]
            if others:
                self._store.rm(others)
        except Exception as error:  # every store has errors of its own
            _log.warning("objects below %s that no engine needs are left: %s", self.url, error)

    def upload(self, path: Path, name: str) -> None:
        """Write a file of this machine."""
        with self._translating(name, "written"):
            self._store.put_file(str(path), self._place(name))

    def download(self, name: str, target: Path) -> None:
        """Read all files of a folder into an empty directory. FileNotFoundError if there is none,
        or if one goes meanwhile.
        """
        found = [each for each in self._list() if each.startswith(f"{name}/")]
        if not found:
            raise FileNotFoundError(self.locate(name))
        for each in found:
            to = inside(target, each.removeprefix(f"{name}/"))
            to.parent.mkdir(parents=True, exist_ok=True)
            with self._translating(each, "read", but=FileNotFoundError):
                self._store.get_file(self._place(each), str(to))

    def _list(self) -> list[str]:
        """The names of all objects."""
        with self._translating("", "listed"):
            self._store.invalidate_cache()
            try:
                found = self._store.find(self._root)
            except FileNotFoundError:
                return []
        return [path[len(self._root) + 1 :] for path in found]

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _translating(
        self, name: str, done: str, but: type[Exception] | tuple[()] = ()
    ) -> Iterator[None]:
        """RefitError that names the object, for whatever the store raises, `but` for that."""
        try:
            yield
        except but:
            raise
        except Exception as error:  # every store has errors of its own
            raise RefitError(
                f"{self.locate(name)} cannot be {done}: {type(error).__name__}: {error}. Does the "
                "store exist, and has this process credentials for it?"
            ) from error


def open_folder(path: str | os.PathLike[str]) -> Directory | ObjectFolder:
    """The folder at a path or URL; `file://` is a path. ConfigError for what is neither."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if isinstance(name, str):
        scheme, mark, rest = name.partition("://")
        if mark and scheme != "file":
            return ObjectFolder(name)
        name = rest if mark else name
    # Absolute: workers, to which it may be sent, run in their own directories.
    return Directory(expanded(name).absolute())
