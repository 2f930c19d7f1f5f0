"""A chain of versions of the weights in a directory: what its manifest says.

    chain.json                        the manifest, replaced as a whole when a version is complete
    CHAIN/VERSION/                    all weights of a version, as an export
    CHAIN/VERSION.RANK.delta          what a rank has changed in it: a message

CHAIN is new for each trainer's run and after each failure: versions of two chains say nothing of
one another.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_policy.errors import RefitError
from megatron_policy.formats.digests import UNSEALED, digest_bytes, is_sealed, seal
from megatron_policy.formats.manifest_values import count, text, xxh3

MANIFEST = "chain.json"
FORMAT = 1
_NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True)
class DeltaFile:
    """What one rank has changed: a file of so many bytes, with this digest."""

    rank: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Version:
    """The weights after `step` optimizer steps. `files` make those of the version before it into
    them.
    """

    number: int
    step: int
    files: tuple[DeltaFile, ...] = ()


@dataclass(frozen=True)
class Chain:
    """The versions that a directory has: some `whole`, and `deltas` to the newest one, each from
    the one before.
    """

    name: str
    whole: tuple[Version, ...]
    deltas: tuple[Version, ...] = ()

    @property
    def newest(self) -> Version:
        """The newest version."""
        return (*self.whole[-1:], *self.deltas[-1:])[-1]

    def after(self, number: int) -> tuple[Version, ...] | None:
        """The deltas that make a version the newest one; None if some of them are not there."""
        later = tuple(delta for delta in self.deltas if delta.number > number)
        reached = number == self.newest.number or (later and later[0].number == number + 1)
        return later if reached else None

    def with_delta(self, delta: Version) -> Chain:
        """The chain with one more version."""
        return Chain(self.name, self.whole, (*self.deltas, delta))

    def with_whole(self) -> Chain:
        """The chain whose newest version is there as a whole too, without those that only lead to
        whole ones older than the last.
        """
        last, newest = self.whole[-1], self.newest
        kept = tuple(delta for delta in self.deltas if delta.number > last.number)
        return Chain(self.name, (last, Version(newest.number, newest.step)), kept)

    def place_whole(self, root: Path, number: int) -> Path:
        """The directory of all weights of a version."""
        return root / self.name / f"{number:08d}"

    def place_file(self, root: Path, number: int, rank: int) -> Path:
        """The file of what a rank has changed."""
        return root / self.name / f"{number:08d}.{rank}.delta"

    def is_complete(self, root: Path) -> bool:
        """Whether a directory has all that the chain consists of, as far as sizes tell."""
        return all(self.place_whole(root, each.number).is_dir() for each in self.whole) and all(
            path.is_file() and path.stat().st_size == file.nbytes
            for each in self.deltas
            for file in each.files
            for path in [self.place_file(root, each.number, file.rank)]
        )

    def encode(self) -> bytes:
        """The content of the manifest."""
        content = {
            "digest": UNSEALED,
            "format": FORMAT,
            "chain": self.name,
            "whole": [[version.number, version.step] for version in self.whole],
            "deltas": [
                [v.number, v.step, [[file.rank, file.nbytes, file.digest] for file in v.files]]
                for v in self.deltas
            ],
        }
        return seal(json.dumps(content).encode())


def read_chain(root: Path) -> Chain | None:
    """The chain in a directory; None if there is none. RefitError if its manifest is damaged."""
    path = root / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RefitError(f"{path} cannot be read: {error.strerror}") from error
    try:
        fields = json.loads(content)
        if not is_sealed(content, xxh3(fields["digest"])):
            raise ValueError("its content contradicts its digest")
        return _chain(fields)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise RefitError(f"{path} cannot be read: {error}; refit again") from error


def read_file(root: Path, chain: Chain, number: int, file: DeltaFile) -> bytes:
    """The message of a rank. RefitError if it is damaged, OSError if it is not there."""
    path = chain.place_file(root, number, file.rank)
    content = path.read_bytes()
    if (len(content), digest_bytes(content)) != (file.nbytes, file.digest):
        raise RefitError(
            f"{path} is not what the trainer has written: engines take the next whole version; "
            f"remove {MANIFEST} to have the next refit write one"
        )
    return content


def is_name(name: str) -> bool:
    """Whether a directory of that name belongs to a chain."""
    return _NAME.fullmatch(name) is not None


def _chain(fields: dict[str, Any]) -> Chain:
    if fields["format"] != FORMAT:
        raise ValueError(f"it is of format {fields['format']}, but this version reads {FORMAT}")
    name = text(fields["chain"])
    whole = tuple(Version(count(number), count(step)) for number, step in fields["whole"])
    deltas = tuple(
        Version(count(number), count(step), tuple(_file(*file) for file in files))
        for number, step, files in fields["deltas"]
    )
    numbers = [delta.number for delta in deltas]
    if not is_name(name) or not whole:
        raise ValueError("it has no whole version")
    if numbers != list(range(numbers[0], numbers[0] + len(numbers)) if numbers else []):
        raise ValueError("a version is missing")
    return Chain(name, whole, deltas)


def _file(rank: int, nbytes: int, digest: str) -> DeltaFile:
    return DeltaFile(count(rank), count(nbytes), xxh3(digest))
