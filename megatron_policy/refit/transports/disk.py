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

from megatron_policy.config.model_table import check_source
from megatron_policy.converters.files import publishing
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.formats.hf_config import CONFIG
from megatron_policy.converters.formats.hf_names import MANIFEST
from megatron_policy.converters.formats.hf_writing import write_index
from megatron_policy.converters.formats.side_files import side_files, write_side_files
from megatron_policy.errors import ConfigError, ExportError, RefitError
from megatron_policy.formats.manifest import describe_origin
from megatron_policy.refit.arguments import check_count
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.digest import HOST, algorithm_for, digest
from megatron_policy.refit.hf_directory import (
    CopiedTensors,
    DirectoryWriter,
    ExportPlan,
    Upload,
    describe_directory,
    plan_export,
    upload_all,
)
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.plan import RefitPlan, RefitTensor

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
# A stage's ranks share the writing of its tensors, but not into files smaller than this.
_MIN_SHARD_BYTES = 64 * 2**20
_NOTHING_COPIED = CopiedTensors("", ExportPlan(()))


def export_directory(transport: DirectoryTransport, exporter: Exporter, step: int) -> None:
    """Write the directory of the transport. Collective: an error on one rank is raised on all.

    `step` is the number of optimizer steps taken so far. ConfigError if its path is taken,
    ExportError if a rank cannot write; the policy is then unharmed and nothing is published.
    """
    prepared = None
    try:
        exporter.begin()
        prepared = transport.prepare(exporter)
        place = prepared.place
        if not place.refusal:
            deliver(exporter, transport, step)
            return
        exporter.ranks.leave_together()
    except RefitError as error:
        raise ExportError(str(error)) from error
    finally:
        if prepared is not None:
            prepared.drop()
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
    copied: CopiedTensors = _NOTHING_COPIED


class StagedExport:
    """A directory that is being written, next to its path."""

    def __init__(
        self,
        path: Path,
        files: ExportPlan,
        place: ExportDestination,
        contents: ExportContents | None = None,
        staged: publishing.Staged | None = None,
        upload: Upload | None = None,
    ) -> None:
        """`files` have the policy's own tensors. Only rank 0 has `contents`, and a directory
        `staged` to publish, unless it has refused. Where `upload` takes files away, each of the
        others has one too.
        """
        self.place, self.upload = place, upload
        self.partial = Path(place.partial) if staged is None else staged.partials[0]
        self.files = files.numbered(place.copied_files) if place.copied_files else files
        self._path, self._contents, self._staged = path, contents, staged

    def copy(self) -> dict[str, int]:
        """Write the copied tensors, on rank 0; returns their digests."""
        if self._contents is None or not self.place.copied_files:
            return {}
        files = self._whole.files[len(self.files.files) :]
        return self._contents.copied.write(self.partial, files)

    def publish(self, exporter: Exporter, digests: Mapping[str, int], step: int) -> None:
        """Write the manifest, and rename the directory to its final path, or upload what is left;
        on rank 0, when all have written. `digests` are those of all tensors.
        """
        assert self._contents is not None and self._staged is not None, "rank 0 publishes"
        origin, overrides = self._contents.origin, exporter.served_model.hf_config_overrides
        stated = describe_directory(self.partial, self._whole, digests, origin, step, overrides)
        publishing.write_file(self.partial / MANIFEST, stated.encode())
        if self.upload is None:
            self._staged.publish()
        else:
            upload_all(self.partial, self.upload)

    def drop(self) -> None:
        """Remove what was written, unless it was published: it may have filled the disk."""
        if self._staged is not None:
            self._staged.drop()

    def not_written(self, error: OSError) -> ExportError:
        """The error for a file that could not be written."""
        return publishing.not_written(self._path, error, self.place.nbytes)

    @property
    def _whole(self) -> ExportPlan:
        assert self._contents is not None, "rank 0 knows it"
        return self.files.followed_by(self._contents.copied.plan)


class DirectoryTransport(ABC):
    """A transport: a directory, whose files ranks share between them.

    It is written next to its final path and renamed when every file is on the disk, so `path`
    either does not exist, is unchanged, or is complete. A rank has one whole tensor of its files in
    memory at a time. The directory's manifest has the step and digests that cover every byte.
    """

    def __init__(self, path: str | PathLike[str], overwrite: bool) -> None:
        """With `overwrite`, a checkpoint at `path` is replaced, unless it overlaps what the policy
        was made from.
        """
        # Absolute: workers, to which it may be sent, run in their own directories.
        self.path, self.overwrite = expanded(path).absolute(), overwrite
        self.upload: Upload | None = None
        """Takes files away from this machine."""
        self._prepared: StagedExport | None = None

    @abstractmethod
    def plan(self, exporter: Exporter) -> RefitPlan:
        """What is gathered on this rank. ConfigError unless the exporter has what is written."""

    @abstractmethod
    def _files(self, exporter: Exporter) -> ExportPlan:
        """Which tensors are in which file, and who writes it; the same on every rank."""

    @abstractmethod
    def _collect(self, exporter: Exporter, files: ExportPlan) -> ExportContents:
        """Look up on rank 0 what belongs beside the `files`, before anything is written."""

    def prepare(self, exporter: Exporter) -> StagedExport:
        """Make the directory to write to. Collective over all ranks, which learn its path from
        rank 0; no other export, of this job or another, uses it.
        """
        made, files = None, self._files(exporter)
        try:
            if exporter.rank == 0:
                made = self._make(exporter, files)
            words = None if made is None else json.dumps(asdict(made.place))
            place = ExportDestination(**json.loads(exporter.ranks.broadcast_text(words)))
        except BaseException:
            if made is not None:
                made.drop()
            raise
        if made is None:
            own = publishing.Staged([self.path]) if self.upload and not place.refusal else None
            made = StagedExport(self.path, files, place, None, own, self.upload)
        self._prepared = made
        return made

    def open(self, exporter: Exporter, plan: RefitPlan) -> DirectorySession | None:
        """This rank's files, possibly none; RefitError, on rank 0, if none can be written."""
        prepared, self._prepared = self._prepared or self.prepare(exporter), None
        if not prepared.place.refusal:
            try:
                return DirectorySession(prepared, exporter)
            except BaseException:
                prepared.drop()
                raise
        if exporter.rank == 0:
            raise RefitError(prepared.place.refusal)
        return None

    def _make(self, exporter: Exporter, files: ExportPlan) -> StagedExport:
        staged, nbytes = None, 0
        try:
            contents = check_export(self, exporter)
            nbytes = contents.nbytes
            staged = publishing.Staged([self.path], self.overwrite)
            contents.write(staged.partials[0])
        except BaseException as error:
            if staged is not None:
                staged.drop()
            if not isinstance(error, Exception):
                raise
            if isinstance(error, OSError):
                error = publishing.not_written(self.path, error, nbytes)
            is_config = isinstance(error, ConfigError)
            known = isinstance(error, ConfigError | ExportError)
            refusal = str(error) if known else f"{type(error).__name__}: {error}"
            return StagedExport(self.path, files, ExportDestination("", refusal, is_config))
        count = len(contents.copied.plan.files)
        place = ExportDestination(str(staged.partials[0]), copied_files=count, nbytes=nbytes)
        return StagedExport(self.path, files, place, contents, staged, self.upload)


def check_export(transport: DirectoryTransport, exporter: Exporter) -> ExportContents:
    """What rank 0 will add to the policy's tensors, looked up there before anything is written.

    ConfigError where the path is taken or files of the model are missing, ExportError without room
    on the disk.
    """
    exporter.origin.check_apart(transport.path)
    contents = transport._collect(exporter, transport._files(exporter))
    publishing.check_replaceable(transport.path, transport.overwrite)
    if transport.upload is None:
        publishing.check_room(transport.path, contents.nbytes)
    return contents


class DirectorySession:
    """A rank's end of a `DirectoryTransport`, a `TransportSession`: writes its files; rank 0
    publishes the directory.

    A failure in a file is kept until `finish`, which is collective and tells all ranks; `close`
    does in its place if this rank has not come to it.
    """

    def __init__(self, export: StagedExport, exporter: Exporter) -> None:
        self._export, self._exporter = export, exporter
        grid, rank = exporter.topology, exporter.rank
        own = [file for file in export.files.files if file.find_writer(grid) == rank]
        self._writer = DirectoryWriter(export.partial, own, exporter.ranks.alive, export.upload)
        self._digests: dict[str, int] = {}
        self._failure: Exception | None = None
        self._told = False
        try:
            self._buffer = Buffer.on(exporter.device, self._writer.largest_bytes)
        except RuntimeError as error:
            self._failure = error

    def place(self, tensor: RefitTensor) -> BufferSlice | None:
        """None for tensors in other ranks' files."""
        if self._failure is not None or not self._writer.has(tensor.name):
            return None
        return BufferSlice(self._buffer, 0)

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        held = target.tensor(tensor.shape, tensor.dtype)
        try:
            host = held.cpu()
            self._writer.put(tensor.name, host)
            if algorithm_for(held) != HOST:  # otherwise the final manifest has it
                self._digests[tensor.name] = digest(host, HOST)
        except Exception as error:
            self._failure = error

    def finish(self, manifest: RefitManifest) -> None:
        """Collective over all ranks."""
        if manifest.algorithm == HOST:
            self._digests = {name: sent.digest for name, sent in manifest.tensors.items()}
        ranks, export = self._exporter.ranks, self._export
        if self._failure is None:
            try:
                with ranks.alive():
                    self._digests |= export.copy()
            except Exception as error:
                self._failure = error
        if isinstance(self._failure, OSError):
            self._failure = export.not_written(self._failure)
        parts = self._tell(self._digests if self._failure is None else None)
        if self._failure is not None:
            raise self._failure
        digests = [json.loads(part) for part in parts]
        if digests and None not in digests:
            known = {name: number for part in digests for name, number in part.items()}
            try:
                with ranks.alive():
                    export.publish(self._exporter, known, manifest.step)
            except OSError as error:
                raise export.not_written(error) from error

    def close(self) -> None:
        """An incomplete directory is removed."""
        self._writer.close()
        try:
            if not self._told:
                self._tell(None)
        finally:
            self._export.drop()

    def _tell(self, digests: Mapping[str, int] | None) -> list[str]:
        """Send rank 0 the digests of this rank's tensors, or that it has failed; return on rank 0
        what each has sent.
        """
        self._told = True
        return self._exporter.ranks.gather_text(json.dumps(digests))


class HfDirectory(DirectoryTransport):
    """A directory that transformers, `megatron-policy` and engines load; see `DirectoryTransport`.
    Config, tokenizer and the tensors of layers that the policy leaves out are copied from its
    model, byte for byte.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        source: str | None = None,
        *,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        """`source` is where the policy's model is now, if not at its `model_name` any more; another
        model is refused. A file has at most `max_shard_bytes`, or one tensor.
        """
        super().__init__(path, overwrite)
        check_count(max_shard_bytes, "max_shard_bytes")
        self.source, self._max_shard_bytes = source, max_shard_bytes
        self._planned: tuple[Exporter, ExportPlan] | None = None

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
            for file in self._files(exporter).files
            if (file.stage, grid.block_of(file.find_writer(grid))) == (at.pp, block)
            for tensor in file.tensors
        )
        if not names:
            return RefitPlan((), (at.pp,), exporter.bucket_bytes)
        return exporter.plan(names=names, own_stage=True, as_stored=True)

    def _files(self, exporter: Exporter) -> ExportPlan:
        """Every stage's ranks share the writing of its tensors."""
        if self._planned is None or self._planned[0] is not exporter:
            tensors, topology = exporter.plan(as_stored=True).tensors, exporter.topology
            writers = len(topology.gatherers)
            fair = -(-sum(tensor.nbytes for tensor in tensors) // (writers * topology.pp))
            limit = min(self._max_shard_bytes, max(fair, _MIN_SHARD_BYTES))
            self._planned = exporter, plan_export(tensors, limit, writers)
        return self._planned[1]

    def _collect(self, exporter: Exporter, files: ExportPlan) -> ExportContents:
        """Config, tokenizer, and what is copied."""
        table, source = exporter.table, self.source or exporter.origin.model
        if source != exporter.origin.model:
            check_source(source, table)
        side = side_files(source, table.overrides)
        if CONFIG not in {**side.copied, **side.changed}:
            raise ConfigError(f"{source} no longer has its {CONFIG}: put it back")
        copied = CopiedTensors.of(source, table, exporter.source_dtypes, self._max_shard_bytes)
        whole = files.followed_by(copied.plan)
        config = json.loads(side.content(CONFIG))
        origin = describe_origin("policy -> hf", {"path": source}, table.family, config)

        def write(directory: Path) -> None:
            write_side_files(side, directory, exporter.origin.tokenizer)
            write_index(directory, whole.weight_map, whole.total_bytes)

        return ExportContents(whole.total_bytes + side.nbytes, origin, write, copied)
