"""Writes weights as a Hugging Face directory from all ranks: which file each rank writes, and how
the directory is completed and published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_policy.converters.files import publishing
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats import hf_writing
from megatron_policy.converters.formats.hf_names import MANIFEST
from megatron_policy.converters.formats.safetensors_format import Shape, encode
from megatron_policy.converters.formats.side_files import side_files, write_side_files
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError, ExportError, RefitError
from megatron_policy.formats.digests import of_bytes, of_file, size_of
from megatron_policy.formats.manifest import DirectoryManifest
from megatron_policy.formats.tensors import Info
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.digest import HOST, algorithm_for, digest
from megatron_policy.refit.file_plan import ExportFile, ExportPlan, plan_export
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.plan import RefitPlan
from megatron_policy.refit.transports.carried import CarriedTensors
from megatron_policy.version import VERSION

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.plan import RefitTensor


class DirectorySession:
    """A rank's end of an `HfDirectory`: writes its files; rank 0 publishes the directory.

    A failure in a file is kept until `finish`, which is collective and tells all ranks.
    """

    def __init__(
        self,
        transport: HfDirectory,
        exporter: Exporter,
        plan: ExportPlan,
        partial: Path,
        carried: CarriedTensors | None,
        nbytes: int,
    ) -> None:
        """`partial` is the directory that all ranks write to, `plan` has the files of the policy's
        own tensors. Only rank 0 has tensors that are `carried`. All files have `nbytes`.
        """
        self._nbytes = nbytes
        self._transport, self._exporter, self._plan, self._partial = (
            transport,
            exporter,
            plan,
            partial,
        )
        self._carried = carried
        grid, rank = exporter.topology, exporter.rank
        own = [file for file in plan.files if file.rank_of(grid) == rank]
        self._file_of = {tensor.name: file for file in own for tensor in file.tensors}
        self._written: dict[str, hf_writing.ShardFile] = {}
        self._digests: dict[str, int] = {}
        largest = max((tensor.nbytes for file in own for tensor in file.tensors), default=0)
        self._failure: Exception | None = None
        try:
            self._buffer = Buffer.on(exporter.device, largest)
        except RuntimeError as error:
            self._failure = error

    def place(self, tensor: RefitTensor) -> BufferSlice | None:
        """See `delivery.TransportSession`; None for tensors in other ranks' files."""
        if self._failure is not None or tensor.name not in self._file_of:
            return None
        return BufferSlice(self._buffer, 0)

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        """See `delivery.TransportSession`."""
        try:
            self._write(tensor.name, target.tensor(tensor.shape, tensor.dtype))
        except Exception as error:
            self._failure = error

    def finish(self, manifest: RefitManifest) -> None:
        """See `delivery.TransportSession`; collective over all ranks."""
        if manifest.algorithm == HOST:
            self._digests = {name: sent.digest for name, sent in manifest.tensors.items()}
        copied = self._copy_carried()
        if isinstance(self._failure, OSError):
            self._failure = self._not_written(self._failure)
        own = self._digests if self._failure is None else None
        parts = self._exporter.gather_text(json.dumps(own))
        if self._failure is not None:
            raise self._failure
        digests = [json.loads(part) for part in parts]
        if digests and None not in digests:
            known = {name: number for part in digests for name, number in part.items()}
            try:
                self._publish(known | copied, manifest.step)
            except OSError as error:
                raise self._not_written(error) from error

    def close(self) -> None:
        """See `delivery.TransportSession`; an incomplete directory is removed."""
        for file in self._written.values():
            file.close()
        self._transport.drop()

    def _write(self, name: str, tensor: Tensor) -> None:
        file, host = self._file_of[name], tensor.cpu()
        if file.name not in self._written:
            path = self._partial / file.name
            self._written[file.name] = hf_writing.ShardFile(path, _forms(file))
        self._written[file.name].put(name, host)
        if algorithm_for(tensor) != HOST:  # otherwise the final manifest has it
            self._digests[name] = digest(host, HOST)
        if name == file.tensors[-1].name:
            self._written[file.name].complete()
            del self._written[file.name]

    def _not_written(self, error: OSError) -> ExportError:
        return publishing.not_written(self._transport.path, error, self._nbytes)

    def _copy_carried(self) -> dict[str, int]:
        """The digests of the carried tensors, once they are written; other ranks wait meanwhile."""
        if self._carried is None or self._failure is not None:
            return {}
        files = self._carried.after(self._plan).files[len(self._plan.files) :]
        try:
            with self._exporter.alive():
                return dict(self._carried.write(self._partial, files))
        except Exception as error:
            self._failure = error
            return {}

    def _publish(self, digests: Mapping[str, int], step: int) -> None:
        assert self._carried is not None, "rank 0 publishes"
        found = directory_manifest(
            self._partial,
            self._transport.source,
            self._exporter.table,
            self._carried.after(self._plan),
            digests,
            step,
        )
        publishing.write_file(self._partial / MANIFEST, found.encoded())
        self._transport.publish()


def directory_manifest(
    root: Path,
    source: str,
    table: Table,
    plan: ExportPlan,
    digests: Mapping[str, int],
    step: int,
) -> DirectoryManifest:
    """The manifest of a written directory; `digests` are the tensors', as 64-bit numbers."""
    tensors = {
        tensor.name: (Info(tensor.dtype, tensor.shape), f"{digests[tensor.name] % 2**64:016x}")
        for file in plan.files
        for tensor in file.tensors
    }
    files = {file.name: of_bytes(encode(_forms(file))[0]) for file in plan.files}
    others = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).as_posix() not in files
    ]
    with RawFiles() as reader:
        files |= {
            path.relative_to(root).as_posix(): of_file(reader, path, size_of(path))
            for path in others
        }
    origin = {
        "package": f"megatron-policy {VERSION}",
        "direction": "policy -> hf",
        "source": {"path": source},
        "family": table.family,
        "config": json.loads((root / "config.json").read_bytes()),
    }
    return DirectoryManifest(tensors, files, origin, step, table.overrides)


def _forms(file: ExportFile) -> dict[str, tuple[torch.dtype, Shape]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors}


DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
# A stage's ranks share the writing of its tensors, but not into files smaller than this.
_MIN_SHARD_BYTES = 64 * 2**20


def export_checkpoint(
    path: str | PathLike[str],
    exporter: Exporter,
    source: str,
    step: int,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write config, tokenizer and weights to `path`, as `HfDirectory` does. Collective: an error on
    one rank is raised on all.

    `step` is the number of optimizer steps taken so far. ConfigError if `path` is taken,
    ExportError if a rank cannot write; the policy is then unharmed and nothing is published.
    """
    transport = HfDirectory(path, source, max_shard_bytes=max_shard_bytes, overwrite=overwrite)
    try:
        exporter.begin()
        place = transport.prepare(exporter)
        if not place.refusal:
            deliver(exporter, transport, step)
            return
        exporter.leave_together()
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
    carried_files: int = 0
    """How many files of carried tensors follow those of the policy's own."""
    nbytes: int = 0
    """How many bytes all files have."""


class HfDirectory:
    """A transport: a directory that transformers, `megatron-policy` and engines load.

    Tensors of layers that the policy leaves out are copied from `source`, byte for byte.
    It is written next to its final path and renamed when every file is on the disk, so `path`
    either does not exist, is unchanged, or is complete. A rank has one whole tensor of its files in
    memory at a time. The directory's manifest has the step and digests that cover every byte.
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
        # Absolute: workers, to which it may be sent, run in their own directories.
        self.path, self.source, self.overwrite = expanded(path).absolute(), source, overwrite
        self._max_shard_bytes = max_shard_bytes
        self._files: tuple[Exporter, ExportPlan] | None = None
        self._place: ExportDestination | None = None
        self._carried: CarriedTensors | None = None
        self._staged: publishing.Staged | None = None

    def files(self, exporter: Exporter) -> ExportPlan:
        """Which tensors are in which file, and who writes it; the same on every rank."""
        if self._files is None or self._files[0] is not exporter:
            self._files = (exporter, plan_files(exporter, self._max_shard_bytes))
        return self._files[1]

    def plan(self, exporter: Exporter) -> RefitPlan:
        """The tensors of the files that the ranks of this stage write which gather together.
        ConfigError for adapters alone.
        """
        if exporter.only_adapters:
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

    def prepare(self, exporter: Exporter) -> ExportDestination:
        """Make the directory to write to. Collective over all ranks, which learn its path from
        rank 0; no other export, of this job or another, uses it.
        """
        self.drop()
        try:
            made = self._make(exporter) if exporter.rank == 0 else None
            agreed = exporter.broadcast_text(None if made is None else json.dumps(asdict(made)))
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
            files = self.files(exporter).numbered(place.carried_files)
            partial = Path(place.partial)
            return DirectorySession(self, exporter, files, partial, self._carried, place.nbytes)
        if exporter.rank == 0:
            raise RefitError(place.refusal)
        return None

    def publish(self) -> None:
        """Rename the directory to its final path; on rank 0, when all have written."""
        assert self._staged is not None
        self._staged.publish()

    def drop(self) -> None:
        """Remove what was written, unless it was published: it may have filled the disk."""
        staged, self._staged, self._place = self._staged, None, None
        if staged is not None:
            staged.drop()

    def _make(self, exporter: Exporter) -> ExportDestination:
        files, nbytes = self.files(exporter), 0
        try:
            # Looked up before anything is written.
            side = side_files(self.source, exporter.table.overrides)
            carried = CarriedTensors.of(
                self.source, exporter.table, exporter.source_dtypes, self._max_shard_bytes
            )
            whole = carried.after(files)
            nbytes = whole.total_bytes + side.nbytes
            publishing.check_replaceable(self.path, self.overwrite)
            publishing.check_room(self.path, nbytes)
            self._staged = publishing.Staged([self.path], self.overwrite)
            (partial,) = self._staged.partials
            write_side_files(side, partial, exporter.tokenizer)
            hf_writing.write_index(partial, whole.weight_map, whole.total_bytes)
        except ConfigError as error:
            self.drop()
            return ExportDestination(refusal=str(error), is_config=True)
        except ExportError as error:
            self.drop()
            return ExportDestination(refusal=str(error))
        except OSError as error:
            self.drop()
            return ExportDestination(refusal=str(publishing.not_written(self.path, error, nbytes)))
        except Exception as error:
            self.drop()
            return ExportDestination(refusal=f"{type(error).__name__}: {error}")
        self._carried = carried
        count = len(carried.plan.files)
        return ExportDestination(str(partial), carried_files=count, nbytes=nbytes)


def plan_files(exporter: Exporter, max_shard_bytes: int) -> ExportPlan:
    """Assign files of at most `max_shard_bytes` to the ranks of each stage. Pure."""
    tensors, topology = exporter.plan(as_stored=True).tensors, exporter.topology
    writers = len(topology.gatherers)
    fair = -(-sum(tensor.nbytes for tensor in tensors) // (writers * topology.pp))
    return plan_export(
        tensors,
        min(max_shard_bytes, max(fair, _MIN_SHARD_BYTES)),
        writers,
    )
