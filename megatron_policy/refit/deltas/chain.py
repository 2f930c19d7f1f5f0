"""A chain of versions of the weights in a folder: what its manifest says.

    chain.json                        the manifest, replaced as a whole when a version is complete
    CHAIN/VERSION/                    all weights of a version, as an export
    CHAIN/VERSION.RANK.delta          what a rank has changed in it: a message

CHAIN is new for each trainer's run and after each failure: versions of two chains say nothing of
one another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_policy.errors import RefitError
from megatron_policy.formats.digests import UNSEALED, digest_bytes, is_sealed, seal
from megatron_policy.formats.manifest import count, text, xxh3
from megatron_policy.refit.deltas.folder import Folder

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

    def name_whole(self, number: int) -> str:
        """The folder of all weights of a version."""
        return f"{self.name}/{number:08d}"

    def name_file(self, number: int, rank: int) -> str:
        """The file of what a rank has changed."""
        return f"{self.name}/{number:08d}.{rank}.delta"

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file of what ranks have changed, by name."""
        return {
            self.name_file(each.number, file.rank): file.nbytes
            for each in self.deltas
            for file in each.files
        }

    def is_complete(self, sizes: Mapping[str, int]) -> bool:
        """Whether a folder with files of these sizes has all that the chain consists of, as far as
        sizes tell.
        """
        folders = {name.rpartition("/")[0] for name in sizes}
        return self.files.items() <= sizes.items() and all(
            self.name_whole(each.number) in folders for each in self.whole
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


def read_chain(folder: Folder) -> Chain | None:
    """The chain in a folder; None if there is none. RefitError if its manifest is damaged."""
    path = folder.locate(MANIFEST)
    try:
        content = folder.read(MANIFEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RefitError(f"{path} cannot be read: {error.strerror}") from error
    try:
        fields = json.loads(content)
        if not is_sealed(content, xxh3(fields["digest"])):
            raise ValueError("its content contradicts its digest")
        if fields["format"] != FORMAT:
            raise RefitError(
                f"{path} is of format {fields['format']}, but this version reads {FORMAT}: use the "
                "same version of megatron-policy on both sides"
            )
        return _chain(fields)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise RefitError(f"{path} cannot be read: {error}; refit again") from error


def read_file(folder: Folder, chain: Chain, number: int, file: DeltaFile) -> bytes:
    """The message of a rank. RefitError if it is damaged, OSError if it is not there."""
    name = chain.name_file(number, file.rank)
    content = folder.read(name)
    if (len(content), digest_bytes(content)) != (file.nbytes, file.digest):
        raise RefitError(
            f"{folder.locate(name)} is not what the trainer has written: engines take the next "
            f"whole version; remove {MANIFEST} to have the next refit write one"
        )
    return content


def is_name(name: str) -> bool:
    """Whether a directory of that name belongs to a chain."""
    return _NAME.fullmatch(name) is not None


def _chain(fields: dict[str, Any]) -> Chain:
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
