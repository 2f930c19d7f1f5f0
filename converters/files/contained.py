"""Safe access to the files of an untrusted checkpoint: only regular files of an expected size,
inside its directory. Also what stands where a path was expected: what a typo may have meant.
"""

from __future__ import annotations

import difflib
import errno
import os
import stat
from pathlib import Path

from megatron_policy.errors import ConfigError, ConversionError

LINKS = "MEGATRON_POLICY_LINKS_INTO"
"""Directories, separated as in PATH, into which links in checkpoints may lead."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` expanded; ConfigError if there is no such home directory, or for what is
    no path.
    """
    try:
        return Path(path).expanduser()
    except TypeError as error:
        raise ConfigError(f"{path!r:.80} is no path: give a str or a pathlib.Path") from error
    except RuntimeError as error:
        raise ConfigError(f"the path {str(path)!r} cannot be followed: {error}") from error


def inside(root: Path, name: str) -> Path:
    """The path of a named file in or below a checkpoint's directory.

    ConversionError when the name, or a link, leads out of the directory. Links may lead from a
    snapshot in a hub's cache to the blobs of the same repository, and into the directories listed
    in the environment variable LINKS.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise ConversionError(f"{root} names {name!r:.200}, which is not in its directory")
    path, base = root / name, Path(os.path.realpath(root))
    real = Path(os.path.realpath(path))
    # Where the hub's cache keeps the files of a snapshot of the same repository.
    blobs = [
        each.parent / "blobs"
        for each in (base, *base.parents)
        if each.name == "snapshots" and each.parent.name.startswith("models--")
    ]
    listed = map(expanded, os.environ.get(LINKS, "").split(os.pathsep))
    allowed = [Path(os.path.realpath(each)) for each in listed if each.is_absolute()]
    places = [base, *blobs, *allowed]
    if not any(real.is_relative_to(place) for place in places):
        raise ConversionError(
            f"{path} is a link to {real}, outside the checkpoint: put the file itself there, or "
            f"list the directory in the environment variable {LINKS} if the link is yours"
        )
    return path


def read(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    OSError if it is larger, is not a regular file, or cannot be read. Never blocks on a pipe.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; OSError for anything else, without blocking on it."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def nearest(path: Path, *, directory: bool) -> Path:
    """The missing path with its first missing part replaced by the nearest name there, of a
    `directory` if the path is to be one; the path itself if no name is near.
    """
    missing = next(each for each in (*reversed(path.parents), path) if not each.exists())
    beside = names_in(missing.parent, directories=directory or missing != path)
    found = difflib.get_close_matches(missing.name, beside, n=1, cutoff=0.7)
    if not found:
        return path
    near = missing.parent / found[0]
    whole = near / path.relative_to(missing)
    return whole if whole.exists() else near


def names_in(directory: Path, *, directories: bool) -> list[str]:
    """The names in a directory, or of its `directories` alone, in order and without hidden ones;
    none if it cannot be listed.
    """
    try:
        found = [each for each in directory.iterdir() if not directories or each.is_dir()]
    except OSError:
        return []
    return sorted(each.name for each in found if not each.name.startswith("."))


def how_to_convert(directory: Path) -> str:
    """The command that makes a Hugging Face directory of a checkpoint in Megatron-Core's format,
    which the directory is, or has under the last of its names; "" if it is none.
    """
    for where in ("*.distcp", "*/*.distcp"):
        if found := {file.parent for file in directory.glob(where)}:
            place = max(found)
            model = "" if (place / "hf" / "config.json").is_file() else " --config MODEL"
            return f"`megatron-policy convert {place} OUT --to hf{model}`"
    return ""
