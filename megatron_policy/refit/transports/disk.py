"""Writes weights as a directory from all ranks, of whole models a Hugging Face one: what each rank
writes, and how the directory is completed and published.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_policy.converters.files import publishing
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.formats.hf_config import CONFIG
from megatron_policy.converters.formats.hf_names import MANIFEST
from megatron_policy.converters.formats.hf_writing import write_index
from megatron_policy.converters.formats.side_files import side_files, write_side_files
from megatron_policy.errors import ConfigError, ExportError, RefitError
from megatron_policy.formats.manifest import describe_origin
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.digest import HOST, algorithm_for, digest
from megatron_policy.refit.hf_directory import (
    CopiedTensors,
    DirectoryWriter,
    ExportPlan,
    describe_directory,
    plan_export,
)
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.plan import RefitPlan

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.plan import RefitTensor

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
# A stage's ranks share the writing of its tensors, but not into files smaller than this.
_MIN_SHARD_BYTES = 64 * 2**20


def export_directory(transport: DirectoryTransport, exporter: Exporter, step: int) -> None:
    """Write the directory of the transport. Collective: an error on one rank is raised on all.

    `step` is the number of optimizer steps taken so far. ConfigError if its path is taken,
    ExportError if a rank cannot write; the policy is then unharmed and nothing is published.
    """
    try:
        exporter.begin()
        place = transport.prepare(exporter)
        if not place.refusal:
            deliver(exporter, transport, step)
            return
        exporter.ranks.leave_together()
    except RefitError as error:
        raise ExportError(str(error)) from error
    finally:
        transport.drop()
    raise ConfigError(place.refusal) if place.is_config else ExportError(f"rank 0: {place.refusal}")


@dataclass(frozen=True)
class ExportDestination:
    """Where rank 0 has decided to write an export, or why it cannot."""

    partial: str = ""
    refusal: str = ""
    is_config: bool = False
    """Whether the path or the model was refused."""
    copied_files: int = 0
    """How many files of copied tensors follow those of the policy's own."""
    nbytes: int = 0
    """How many bytes all files have."""


@dataclass(frozen=True)
class ExportContents:
    """What rank 0 adds to the policy's own tensors."""

    nbytes: int
    """Of all files."""
    origin: Mapping[str, Any]
    write: Callable[[Path], object]
    """Writes the files besides tensors and manifest to a directory."""
    copied: CopiedTensors | None = None


class DirectoryTransport(ABC):
    """A transport: a directory that all ranks write between them.

    It is written next to its final path and renamed when every file is on the disk, so `path`
    either does not exist, is unchanged, or is complete. A rank has one whole tensor of its files in
    memory at a time. The directory's manifest has the step and digests that cover every byte.
    """

    def __init__(self, path: str | PathLike[str], overwrite: bool) -> None:
        """With `overwrite`, a checkpoint at `path` is replaced."""
        # Absolute: workers, to which it may be sent, run in their own directories.
        self.path, self.overwrite = expanded(path).absolute(), overwrite
        self._place: ExportDestination | None = None
        self._contents: ExportContents | None = None
        self._staged: publishing.Staged | None = None

    @abstractmethod
    def plan(self, exporter: Exporter) -> RefitPlan:
        """What is gathered on this rank. ConfigError unless the exporter has what is written."""

    @abstractmethod
    def files(self, exporter: Exporter) -> ExportPlan:
        """Which tensors are in which file, and who writes it; the same on every rank."""

    @abstractmethod
    def collect(self, exporter: Exporter, files: ExportPlan) -> ExportContents:
        """Look up on rank 0 what belongs beside the `files`, before anything is written."""

    def prepare(self, exporter: Exporter) -> ExportDestination:
        """Make the directory to write to. Collective over all ranks, which learn its path from
        rank 0; no other export, of this job or another, uses it.
        """
        self.drop()
        try:
            made = self._make(exporter) if exporter.rank == 0 else None
            agreed = exporter.ranks.broadcast_text(
                None if made is None else json.dumps(asdict(made))
            )
        except BaseException:
            self.drop()
            raise
        self._place = ExportDestination(**json.loads(agreed))
        return self._place

    def open(self, exporter: Exporter, plan: RefitPlan) -> DirectorySession | None:
        """This rank's files, possibly none; RefitError, on rank 0 only, if there is no directory to
        write to.
        """
        place, self._place = self._place or self.prepare(exporter), None
        if not place.refusal:
            return DirectorySession(self, exporter, place)
        if exporter.rank == 0:
            raise RefitError(place.refusal)
        return None

    def publish(
        self, exporter: Exporter, files: ExportPlan, digests: Mapping[str, int], step: int
    ) -> None:
        """Write the manifest, and rename the directory to its final path; on rank 0, when all have
        written the `files` of the policy's own tensors. `digests` are those of the tensors.
        """
        contents, staged = self._contents, self._staged
        assert contents is not None and staged is not None, "rank 0 publishes"
        (partial,) = staged.partials
        if contents.copied is not None:
            files = files.followed_by(contents.copied.plan)
        overrides = exporter.served_model.hf_config_overrides
        stated = describe_directory(partial, files, digests, contents.origin, step, overrides)
        publishing.write_file(partial / MANIFEST, stated.encoded())
        staged.publish()

    def copy(self, partial: Path, files: ExportPlan) -> dict[str, int]:
        """Write the copied tensors that follow the `files`; returns their digests."""
        if self._contents is None or (copied := self._contents.copied) is None:
            return {}
        return copied.write(partial, files.followed_by(copied.plan).files[len(files.files) :])

    def drop(self) -> None:
        """Remove what was written, unless it was published: it may have filled the disk."""
        staged, self._staged, self._place = self._staged, None, None
        if staged is not None:
            staged.drop()

    def _make(self, exporter: Exporter) -> ExportDestination:
        nbytes = 0
        try:
            self._contents = contents = self.collect(exporter, self.files(exporter))
            nbytes = contents.nbytes
            publishing.check_replaceable(self.path, self.overwrite)
            publishing.check_room(self.path, nbytes)
            self._staged = publishing.Staged([self.path], self.overwrite)
            (partial,) = self._staged.partials
            contents.write(partial)
        except Exception as error:
            self.drop()
            if isinstance(error, OSError):
                error = publishing.not_written(self.path, error, nbytes)
            known = isinstance(error, ConfigError | ExportError)
            refusal = str(error) if known else f"{type(error).__name__}: {error}"
            return ExportDestination(refusal=refusal, is_config=isinstance(error, ConfigError))
        count = 0 if contents.copied is None else len(contents.copied.plan.files)
        return ExportDestination(str(partial), copied_files=count, nbytes=nbytes)


class DirectorySession:
    """A rank's end of a `DirectoryTransport`: writes its files; rank 0 publishes the directory.

    A failure in a file is kept until `finish`, which is collective and tells all ranks.
    """

    def __init__(
        self, transport: DirectoryTransport, exporter: Exporter, place: ExportDestination
    ) -> None:
        self._transport, self._exporter, self._place = transport, exporter, place
        self._files = transport.files(exporter)
        if place.copied_files:
            self._files = self._files.numbered(place.copied_files)
        grid, rank = exporter.topology, exporter.rank
        own = [file for file in self._files.files if file.rank_of(grid) == rank]
        self._writer = DirectoryWriter(Path(place.partial), own, exporter.ranks.alive)
        self._digests: dict[str, int] = {}
        self._failure: Exception | None = None
        try:
            self._buffer = Buffer.on(exporter.device, self._writer.largest_bytes)
        except RuntimeError as error:
            self._failure = error

    def place(self, tensor: RefitTensor) -> BufferSlice | None:
        """See `delivery.TransportSession`; None for tensors in other ranks' files."""
        if self._failure is not None or not self._writer.has(tensor.name):
            return None
        return BufferSlice(self._buffer, 0)

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        """See `delivery.TransportSession`."""
        held = target.tensor(tensor.shape, tensor.dtype)
        try:
            host = held.cpu()
            self._writer.put(tensor.name, host)
            if algorithm_for(held) != HOST:  # otherwise the final manifest has it
                self._digests[tensor.name] = digest(host, HOST)
        except Exception as error:
            self._failure = error

    def finish(self, manifest: RefitManifest) -> None:
        """See `delivery.TransportSession`; collective over all ranks."""
        if manifest.algorithm == HOST:
            self._digests = {name: sent.digest for name, sent in manifest.tensors.items()}
        if self._failure is None:
            try:
                with self._exporter.ranks.alive():
                    partial = Path(self._place.partial)
                    self._digests |= self._transport.copy(partial, self._files)
            except Exception as error:
                self._failure = error
        if isinstance(self._failure, OSError):
            self._failure = self._not_written(self._failure)
        own = self._digests if self._failure is None else None
        parts = self._exporter.ranks.gather_text(json.dumps(own))
        if self._failure is not None:
            raise self._failure
        digests = [json.loads(part) for part in parts]
        if digests and None not in digests:
            known = {name: number for part in digests for name, number in part.items()}
            try:
                with self._exporter.ranks.alive():
                    self._transport.publish(self._exporter, self._files, known, manifest.step)
            except OSError as error:
                raise self._not_written(error) from error

    def close(self) -> None:
        """See `delivery.TransportSession`; an incomplete directory is removed."""
        self._writer.close()
        self._transport.drop()

    def _not_written(self, error: OSError) -> ExportError:
        return publishing.not_written(self._transport.path, error, self._place.nbytes)


class HfDirectory(DirectoryTransport):
    """A directory that transformers, `megatron-policy` and engines load; see `DirectoryTransport`.
    Tensors of layers that the policy leaves out are copied from `source`, byte for byte.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        source: str,
        *,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        """`source` is the model whose config and tokenizer are copied. A file has at most
        `max_shard_bytes`, or one tensor. With `overwrite`, a checkpoint at `path` is replaced.
        """
        super().__init__(path, overwrite)
        self.source, self._max_shard_bytes = source, max_shard_bytes
        self._files: tuple[Exporter, ExportPlan] | None = None

    def plan(self, exporter: Exporter) -> RefitPlan:
        """The tensors of the files that the ranks of this stage write which gather together.
        ConfigError for adapters alone.
        """
        if exporter.served_model.adapters is not None:
            raise ConfigError("HfDirectory writes whole models: take PeftDirectory for adapters")
        grid, at = exporter.topology, exporter.coords
        block = grid.block_of(exporter.rank)
        names = tuple(
            tensor.name
            for file in self.files(exporter).files
            if (file.stage, grid.block_of(file.rank_of(grid))) == (at.pp, block)
            for tensor in file.tensors
        )
        if not names:
            return RefitPlan((), (at.pp,), exporter.bucket_bytes)
        return exporter.plan(names=names, own_stage=True, as_stored=True)

    def files(self, exporter: Exporter) -> ExportPlan:
        """See `DirectoryTransport`; every stage's ranks share the writing of its tensors."""
        if self._files is None or self._files[0] is not exporter:
            tensors, topology = exporter.plan(as_stored=True).tensors, exporter.topology
            writers = len(topology.gatherers)
            fair = -(-sum(tensor.nbytes for tensor in tensors) // (writers * topology.pp))
            limit = min(self._max_shard_bytes, max(fair, _MIN_SHARD_BYTES))
            self._files = exporter, plan_export(tensors, limit, writers)
        return self._files[1]

    def collect(self, exporter: Exporter, files: ExportPlan) -> ExportContents:
        """See `DirectoryTransport`: config, tokenizer, and what is copied."""
        table = exporter.table
        side = side_files(self.source, table.overrides)
        copied = CopiedTensors.of(self.source, table, exporter.source_dtypes, self._max_shard_bytes)
        whole = files.followed_by(copied.plan)
        config = json.loads(side.content(CONFIG))
        origin = describe_origin("policy -> hf", {"path": self.source}, table.family, config)

        def write(directory: Path) -> None:
            write_side_files(side, directory, exporter.tokenizer)
            write_index(directory, whole.weight_map, whole.total_bytes)

        return ExportContents(whole.total_bytes + side.nbytes, origin, write, copied)
