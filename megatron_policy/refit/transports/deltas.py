"""Publishes weights in a directory as a chain of versions: all of them now and then, and after each
refit what has changed.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.formats.digests import digest_bytes
from megatron_policy.refit.arguments import check_count
from megatron_policy.refit.delivery import deliver, explain_whole
from megatron_policy.refit.deltas.chain import (
    MANIFEST,
    Chain,
    encode_delta,
    is_name,
    read_chain,
)
from megatron_policy.refit.deltas.changes import SentCopy, list_shares
from megatron_policy.refit.deltas.folder import Directory, ObjectFolder, open_folder
from megatron_policy.refit.deltas.message import Fragment, encode_message
from megatron_policy.refit.digest import HOST
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.transports.disk import DirectoryTransport, HfDirectory
from megatron_policy.refit.transports.peft import PeftDirectory

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter

_log = logging.getLogger(__name__)

DEFAULT_WHOLE_EVERY = 64
_MOST_COPIES = 2
_NO_ROOM = "or choose another path"  # in what is said of a full disk
_HOW_TO_SHORTEN = (
    f"Engines keep what they have loaded: to free all of {{}}, remove {MANIFEST} there and then "
    "the folders beside it, and the next refit writes whole weights. A smaller whole_every keeps "
    "fewer changes"
)


@dataclass(frozen=True)
class _Published:
    """What a policy has published in a directory, and a rank's copy of the newest version."""

    chain: Chain
    copy: SentCopy
    unwritten: Sequence[Fragment] = ()
    """What the copy has beside that version, of refits that could not be written."""

    @property
    def is_worth_keeping(self) -> bool:
        """Whether this is less than a whole version."""
        return sum(len(of.encoded.content) for of in self.unwritten) < self.copy.nbytes


class DeltaDirectory:
    """A directory that any number of engines follow, each as it comes: they read what has changed
    since their version, and all weights if they have none of this chain.

    Each rank writes what it has changed itself: nothing is gathered, except for whole versions.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, whole_every: int = DEFAULT_WHOLE_EVERY
    ) -> None:
        """`path` is new, empty, or of an earlier `DeltaDirectory`; or the URL of such a place in a
        store that fsspec knows, such as `s3://bucket/run-7`. After `whole_every` refits all weights
        are written again, and what only leads to those before is removed. The policy keeps a copy
        of what it has published, in host memory, of the two places where it has published last.
        """
        check_count(whole_every, "whole_every")
        self._folder, self._whole_every = open_folder(path), whole_every
        self.path = self._folder.root if isinstance(self._folder, Directory) else self._folder.url
        """Where it is."""

    def deliver(self, exporter: Exporter, step: int) -> RefitManifest:
        """Publish the weights as they are after `step` optimizer steps.

        Collective over all ranks. RefitError on all of them if any failed: what was published
        stays, what else was written is removed, and the next refit continues the chain if it can.
        ConfigError if something else is at the path.
        """
        try:
            return self._deliver(exporter, step)
        except RefitError as error:
            if exporter.rank == 0:
                self._remove_unpublished()
            raise RefitError(self._advise(error)) from error

    def _deliver(self, exporter: Exporter, step: int) -> RefitManifest:
        began = time.perf_counter()
        published: _Published | None = exporter.published.get(self.path)
        name, why = self._begin(exporter, published)
        exporter.published.pop(self.path, None)  # unless all goes well
        if published is not None and published.chain.name == name:
            copy = published.copy
            chain, nbytes = self._publish_delta(exporter, published, step)
            sent = RefitManifest(step, HOST, {}, exporter.served_model, nbytes)
            exporter.published[self.path] = _Published(chain, copy)
            if chain.newest.number - chain.whole[-1].number >= self._whole_every:
                copy.forget_sums()  # an engine may have refused what follows from them
                chain = self._add_whole(exporter, chain)
        else:
            del published  # before another copy is made
            exporter.ranks.leave_together()
            copies: list[SentCopy] = []
            chain = Chain.begin(name, step)
            sent = self._publish_whole(exporter, chain, lambda: copies.append(_copy(exporter)))
            (copy,) = copies
            sent = explain_whole(exporter, sent, why)
        exporter.published[self.path] = _Published(chain, copy)
        return replace(sent, seconds=time.perf_counter() - began)

    def _begin(self, exporter: Exporter, last: _Published | None) -> tuple[str, str]:
        """Begin an operation, of which rank 0 decides the chain: that of before, if the directory
        has what was published last, or a new one, and why. Copies of places that others have
        replaced are freed. Collective.
        """
        exporter.begin()
        words = None
        if exporter.rank == 0:
            try:
                if isinstance(self._folder, Directory):
                    exporter.origin.check_apart(self._folder.root)
                decided = self._decide(last, exporter.topology.world_size)
                words = json.dumps({"chain": decided, "copies": self._list_copies(exporter)})
            except (ConfigError, OSError) as error:
                words = json.dumps({"refusal": str(error)})
            except RefitError as error:
                words = json.dumps({"failure": str(error)})
        decided = json.loads(exporter.ranks.broadcast_text(words))
        if "chain" not in decided:
            exporter.ranks.leave_together()
            if "failure" in decided:
                raise RefitError(f"rank 0: {decided['failure']}")
            raise ConfigError(decided["refusal"])
        name, why = decided["chain"]
        for path, kept in list(exporter.published.items()):
            if isinstance(kept, _Published) and str(path) not in decided["copies"]:
                del exporter.published[path]
        return name, why

    def _list_copies(self, exporter: Exporter) -> list[str]:
        """The places whose copies are kept, on rank 0: this, and those published in last."""
        of = exporter.published.items()
        others = [str(p) for p, kept in of if isinstance(kept, _Published) and p != self.path]
        return [str(self.path), *others[1 - _MOST_COPIES :]]

    def _decide(self, last: _Published | None, ranks: int) -> tuple[str, str]:
        """The chain of the next version and, if it is a new one, why."""
        self._folder.prepare()
        found = self._folder.list_files()
        names = {folder.partition("/")[0] for folder in found if folder} | {*found.get("", ())}
        # NFS gives names such as .nfs0001 to what a process still reads that another replaces.
        others = sorted(n for n in names if not is_name(n) and not n.startswith(".nfs"))
        if others not in ([], [MANIFEST]):
            raise ConfigError(
                f"{self.path} has {others[0]}, which is of no DeltaDirectory: give it a "
                "directory of its own"
            )
        try:
            published = read_chain(self._folder)
        except RefitError:
            published = None
        if last is None:
            why = (
                "nothing is kept of a refit there: this is the first of the process, the last one "
                f"has failed, or {_MOST_COPIES} other places were published in since"
            )
        elif published is None:
            why = f"{MANIFEST} there is gone or cannot be read"
        elif published != last.chain:
            why = f"{MANIFEST} there is not what was published last"
        elif not published.is_complete(found, ranks):
            why = "files that were published there are gone"
        else:
            return last.chain.name, ""
        if last is not None and published is not None and published.name != last.chain.name:
            _log.warning(
                "another trainer publishes in %s: each refit of either then begins a new chain, "
                "with whole weights. Give each a place of its own",
                self.path,
            )
        return secrets.token_hex(8), why

    def _publish_delta(self, exporter: Exporter, last: _Published, step: int) -> tuple[Chain, int]:
        """End the operation with one more version; the chain, and the bytes that this rank has
        written. Collective.
        """
        ranks, number = exporter.ranks, last.chain.newest.number + 1
        written: tuple[int, str] | None = None
        failure: Exception | None = None
        kept: _Published | None = None
        try:
            with ranks.alive():
                kept = replace(last, unwritten=[*last.unwritten, *last.copy.advance()])
                written = self._write_file(kept, number, exporter.rank)
        except Exception as error:
            failure = error
        if kept is not None and kept.is_worth_keeping and exporter.rank > 0:
            exporter.published[self.path] = kept
        own = [kept is not None and kept.is_worth_keeping, written and written[1]]
        found = [json.loads(each) for each in ranks.gather_text(json.dumps(own))]
        manifest = encode_delta(last.chain.digest, [each for _, each in found])
        chain = last.chain.with_delta(step, digest_bytes(manifest))
        if found and all(keeps for keeps, _ in found):  # rank 0 decides on the next chain
            exporter.published[self.path] = kept
        if found and all(each is not None for _, each in found):
            failure = _attempt(lambda: self._publish(chain, manifest))
        exporter.agree(failure)
        assert written is not None
        return chain, written[0]

    def _write_file(self, last: _Published, number: int, rank: int) -> tuple[int, str]:
        """Write what this rank has changed; its bytes and digest."""
        content = encode_message(last.unwritten)
        self._folder.write(last.chain.name_file(number, rank), content)
        return len(content), digest_bytes(content)

    def _publish_whole(
        self, exporter: Exporter, chain: Chain, and_then: Callable[[], object] = lambda: None
    ) -> RefitManifest:
        """Publish the chain, whose newest version is a whole one, and remove what it does not have.
        Each rank does something then. Collective.
        """
        newest = chain.newest
        sent = deliver(exporter, self._whole_of(exporter, chain), newest.step)
        exporter.begin()
        with exporter.ranks.alive():
            failure = _attempt(and_then)
        if exporter.rank == 0 and failure is None:
            failure = _attempt(lambda: self._publish(chain))
        exporter.agree(failure)
        if exporter.rank == 0:
            self._remove_others(chain)
        return sent

    def _add_whole(self, exporter: Exporter, chain: Chain) -> Chain:
        """The chain whose newest version is there as a whole too. Engines can take it already: if
        it cannot be written, rank 0 warns, and the chain is as it was. Collective.
        """
        longer = chain.with_whole()
        try:
            self._publish_whole(exporter, longer)
        except RefitError as error:
            if exporter.rank == 0:
                self._remove_unpublished()
                _log.warning(
                    "version %d is published in %s, but not its whole weights, which were due: %s. "
                    "The next refit writes them, if it can",
                    chain.newest.number,
                    self.path,
                    self._advise(error),
                )
            return chain
        return longer

    def _advise(self, error: RefitError) -> str:
        """What has failed, and how to make room if there was none."""
        full = _NO_ROOM in str(error) and isinstance(self._folder, Directory)
        return f"{error}. {_HOW_TO_SHORTEN.format(self.path)}" if full else str(error)

    def _whole_of(self, exporter: Exporter, chain: Chain) -> DirectoryTransport:
        kind = HfDirectory if exporter.served_model.adapters is None else PeftDirectory
        name = chain.name_whole(chain.newest.number)
        if isinstance(self._folder, Directory):
            return kind(self._folder.root / name)
        whole = kind(find_staging(self._folder.url))
        whole.upload = partial(_upload, self._folder, name)
        return whole

    def _publish(self, chain: Chain, of_newest: bytes = b"") -> None:
        """Publish the chain, with the manifest of its newest delta if that is new too."""
        if of_newest:
            self._folder.write(chain.name_manifest(chain.newest.number), of_newest)
        self._folder.replace(MANIFEST, chain.encode(), chain.name)

    def _remove_unpublished(self) -> None:
        """Remove what a refit has left that failed: it may have filled the disk."""
        with suppress(RefitError):  # the store does not answer, or the manifest is damaged
            if (published := read_chain(self._folder)) is not None:
                self._remove_others(published)

    def _remove_others(self, chain: Chain) -> None:
        """Remove what is not in the chain, as far as that is possible."""
        whole, deltas = chain.folders
        self._folder.keep_only(whole | deltas)


def find_staging(url: str) -> Path:
    """Beside which a trainer of this machine writes the files that it uploads there: always the
    same, so that the next one removes what is left of one that was killed.
    """
    return Path(tempfile.gettempdir(), f"megatron-policy-{digest_bytes(url.encode())}")


def _upload(folder: ObjectFolder, whole: str, path: Path, name: str) -> None:
    folder.upload(path, f"{whole}/{name}")
    path.unlink()


def _attempt(act: Callable[[], object]) -> Exception | None:
    """Call it, and return why it failed."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _copy(exporter: Exporter) -> SentCopy:
    plan = exporter.plan(as_stored=True)
    architecture = exporter.table.architecture
    shares = list_shares(plan, architecture, exporter.topology, exporter.rank)
    return SentCopy(list(shares), exporter.view)
