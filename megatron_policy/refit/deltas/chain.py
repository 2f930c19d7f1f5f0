"""A chain of versions of the weights in a folder: what its manifests say.

    chain.json                        the versions, replaced as a whole when one is complete
    CHAIN/VERSION/                    all weights of a version, as an export
    CHAIN/VERSION.delta/RANK.delta    what a rank has changed in it: a message
    CHAIN/VERSION.delta/version.json  the digests of these, and that of the one before

CHAIN is new for each trainer's run and after each failure: versions of two chains say nothing of
one another. `chain.json` has the digest of the newest `version.json`, so that all of them are
known by their digests, and none is written or read again for a version that comes later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_policy.errors import RefitError
from megatron_policy.formats.digests import UNSEALED, digest_bytes, is_sealed, seal
from megatron_policy.formats.manifest import count, text, xxh3
from megatron_policy.refit.deltas.folder import Folder

MANIFEST, VERSION_MANIFEST = "chain.json", "version.json"
FORMAT = 2
_NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True)
class Version:
    """The weights after `step` optimizer steps."""

    number: int
    step: int


@dataclass(frozen=True)
class Chain:
    """The versions that a directory has: some `whole`, and deltas from the first of these to the
    `newest`, each from the one before. `digest` is of the newest delta's manifest.
    """

    name: str
    whole: tuple[Version, ...]
    newest: Version
    digest: str = UNSEALED

    @classmethod
    def begin(cls, name: str, step: int) -> Chain:
        """The chain of one whole version."""
        first = Version(0, step)
        return cls(name, (first,), first)

    def leads_from(self, number: int) -> bool:
        """Whether deltas make that version the newest one."""
        return self.whole[0].number <= number <= self.newest.number

    def with_delta(self, step: int, digest: str) -> Chain:
        """The chain with one more version, whose manifest has this digest."""
        return Chain(self.name, self.whole, Version(self.newest.number + 1, step), digest)

    def with_whole(self) -> Chain:
        """The chain whose newest version is there as a whole too, without those that only lead to
        whole ones older than the last.
        """
        return Chain(self.name, (self.whole[-1], self.newest), self.newest, self.digest)

    def name_whole(self, number: int) -> str:
        """The folder of all weights of a version."""
        return f"{self.name}/{number:08d}"

    def name_delta(self, number: int) -> str:
        """The folder of what has been changed in a version."""
        return f"{self.name}/{number:08d}.delta"

    def name_file(self, number: int, rank: int) -> str:
        """The file of what a rank has changed."""
        return f"{self.name_delta(number)}/{rank}.delta"

    def name_manifest(self, number: int) -> str:
        """The manifest of what has been changed in a version."""
        return f"{self.name_delta(number)}/{VERSION_MANIFEST}"

    @property
    def folders(self) -> tuple[set[str], set[str]]:
        """The folders of the whole versions, and of the deltas."""
        deltas = range(self.whole[0].number + 1, self.newest.number + 1)
        return {self.name_whole(of.number) for of in self.whole}, set(map(self.name_delta, deltas))

    def is_complete(self, found: Mapping[str, Collection[str]], ranks: int) -> bool:
        """Whether folders with these files have all that the chain of a trainer of so many ranks
        consists of, as far as names tell.
        """
        whole, deltas = self.folders
        files = {VERSION_MANIFEST, *(f"{rank}.delta" for rank in range(ranks))}
        return whole <= found.keys() and all(files <= set(found.get(of, ())) for of in deltas)

    def encode(self) -> bytes:
        """The content of `chain.json`."""
        content = {
            "digest": UNSEALED,
            "format": FORMAT,
            "chain": self.name,
            "whole": [[version.number, version.step] for version in self.whole],
            "newest": [self.newest.number, self.newest.step, self.digest],
        }
        return seal(json.dumps(content).encode())


def encode_delta(before: str, digests: Sequence[str]) -> bytes:
    """The content of a version's manifest: the digests of the ranks' files, in their order, and of
    the manifest `before`.
    """
    return json.dumps({"before": before, "files": digests}).encode()


def read_chain(folder: Folder) -> Chain | None:
    """The chain in a folder; None if there is none. RefitError if `chain.json` is damaged."""
    path = folder.locate(MANIFEST)
    try:
        content = folder.read(MANIFEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RefitError(f"{path} cannot be read: {error.strerror}") from error
    return decode_chain(content, path)


def decode_chain(content: bytes, path: str) -> Chain:
    """The chain of which this is the manifest, from that path; RefitError if it is damaged."""
    try:
        fields = json.loads(content)
        if not is_sealed(content, xxh3(fields["digest"])):
            raise ValueError("its content contradicts its digest")
        if fields["format"] != FORMAT:
            raise RefitError(
                f"{path} is of format {fields['format']}, but this version reads {FORMAT}: use the "
                "same version of megatron-policy on both sides; a trainer's next refit to it "
                "begins a new chain"
            )
        return _chain(fields)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise RefitError(f"{path} cannot be read: {error}; refit again") from error


def read_messages(folder: Folder, chain: Chain, since: int) -> Iterator[bytes]:
    """The messages that make that version the newest one, in order. RefitError if a file is
    damaged, OSError if it is not there.
    """
    later, digest = [], chain.digest
    for number in range(chain.newest.number, since, -1):
        content = _read(folder, name := chain.name_manifest(number), digest)
        try:
            fields = json.loads(content)
            digest = xxh3(fields["before"])
            later.append((number, [xxh3(each) for each in fields["files"]]))
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise RefitError(f"{folder.locate(name)} cannot be read: {error}") from error
    for number, digests in reversed(later):
        for rank, digest in enumerate(digests):
            yield _read(folder, chain.name_file(number, rank), digest)


def is_name(name: str) -> bool:
    """Whether a directory of that name belongs to a chain."""
    return _NAME.fullmatch(name) is not None


def _read(folder: Folder, name: str, digest: str) -> bytes:
    content = folder.read(name)
    if digest_bytes(content) != digest:
        raise RefitError(
            f"{folder.locate(name)} is not what the trainer has written: engines take the next "
            f"whole version; remove {MANIFEST} to have the next refit write one"
        )
    return content


def _chain(fields: dict[str, Any]) -> Chain:
    name = text(fields["chain"])
    whole = tuple(Version(count(number), count(step)) for number, step in fields["whole"])
    number, step, digest = fields["newest"]
    newest = Version(count(number), count(step))
    if not is_name(name) or not whole:
        raise ValueError("it has no whole version")
    if not whole[0].number <= whole[-1].number <= newest.number:
        raise ValueError("its versions are not in order")
    return Chain(name, whole, newest, xxh3(digest))
