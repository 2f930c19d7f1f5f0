"""Writes the policy as a Hugging Face checkpoint directory, every rank its files; knows no
optimizer and no engine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_policy.converters import hf_writing, publishing
from megatron_policy.converters.hf_files import side_contents
from megatron_policy.errors import ConfigError, ExportError, RefitError
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.disk_files import DirectoryOutlet
from megatron_policy.refit.files import ExportPlan, plan_export
from megatron_policy.refit.plan import RefitPlan

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
# A stage's ranks share its tensors out between them, but not into files smaller than this.
_MIN_SHARD_BYTES = 64 * 2**20


def export_checkpoint(
    path: str | PathLike[str],
    exporter: Exporter,
    source: str,
    step: int,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write config, tokenizer and weights to `path`, as `HfDirectory` does; collective: an error of
    one rank is raised on all.

    `step` counts the optimizer steps behind the weights. ConfigError for a `path` that is taken,
    ExportError when a rank cannot write; the policy is unharmed and nothing was published.
    """
    sink = HfDirectory(path, source, max_shard_bytes=max_shard_bytes, overwrite=overwrite)
    try:
        exporter.begin()
        place = sink.prepare(exporter)
        if not place.refusal:
            deliver(exporter, sink, step)
            return
        exporter.part()
    except RefitError as error:
        raise ExportError(str(error)) from error
    finally:
        sink.drop()
    raise ConfigError(place.refusal) if place.is_config else ExportError(f"rank 0: {place.refusal}")


@dataclass(frozen=True)
class Place:
    """Where rank 0 has said that an export is written, or why there is none."""

    partial: str = ""
    refusal: str = ""
    is_config: bool = False
    """Whether it is the path, or the model, that is not accepted."""


class HfDirectory:
    """A sink: a directory that transformers, `megatron-policy` and engines load.

    It is written beside its final name and renamed when every file is on the disk, so `path` either
    does not exist, is what it was, or is complete. A rank has one whole tensor of its files in
    memory at a time. The directory's manifest has the step and a digest of every byte.
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
        `max_shard_bytes`, or one tensor. With `overwrite` a checkpoint at `path` is replaced.
        """
        self.path, self.source, self.overwrite = path, source, overwrite
        self._max_shard_bytes = max_shard_bytes
        self._files: tuple[Exporter, ExportPlan] | None = None
        self._place: Place | None = None
        self._staged: publishing.Staged | None = None

    def files(self, exporter: Exporter) -> ExportPlan:
        """What is in which file, and which rank of its stage writes it: the same on every rank."""
        if self._files is None or self._files[0] is not exporter:
            self._files = (exporter, plan_files(exporter, self._max_shard_bytes))
        return self._files[1]

    def plan(self, exporter: Exporter) -> RefitPlan:
        """The tensors of the files that the ranks of this stage and replica write."""
        at, tp = exporter.coords, exporter.topology.tp
        names = tuple(
            tensor.name
            for file in self.files(exporter).files
            if at.cp == 0 and (file.stage, file.writer // tp) == (at.pp, at.dp)
            for tensor in file.tensors
        )
        if not names:
            return RefitPlan((), 1, (at.pp,), exporter.bucket_bytes)
        return exporter.plan(names=names, own_stage=True, as_stored=True)

    def prepare(self, exporter: Exporter) -> Place:
        """Make the directory to write in; collective over all ranks, which learn from rank 0 where
        that is: no other export, of this job or of another, has it.
        """
        self.drop()
        try:
            made = self._make(exporter) if exporter.rank == 0 else None
            told = exporter.told(None if made is None else json.dumps(asdict(made)))
        except BaseException:
            self.drop()
            raise
        self._place = Place(**json.loads(told))
        return self._place

    def open(self, exporter: Exporter, plan: RefitPlan) -> DirectoryOutlet | None:
        """This rank's files, of which it may have none; RefitError on rank 0 alone when there is no
        directory to write in.
        """
        place, self._place = self._place or self.prepare(exporter), None
        if not place.refusal:
            return DirectoryOutlet(self, exporter, self.files(exporter), Path(place.partial))
        if exporter.rank == 0:
            raise RefitError(place.refusal)
        return None

    def publish(self) -> None:
        """Give the directory its name; on rank 0, when all have written."""
        assert self._staged is not None
        self._staged.publish()

    def drop(self) -> None:
        """Remove what was written, unless it was published: it may be what has filled the disk."""
        staged, self._staged, self._place = self._staged, None, None
        if staged is not None:
            staged.drop()

    def _make(self, exporter: Exporter) -> Place:
        files = self.files(exporter)
        try:
            side = side_contents(self.source)  # before anything is written
            self._staged = publishing.Staged([self.path], self.overwrite)
            (partial,) = self._staged.partials
            for name, content in side.items():
                publishing.write_file(partial / name, content)
            hf_writing.write_index(partial, files.weight_map, files.total_bytes)
        except ConfigError as error:
            self.drop()
            return Place(refusal=str(error), is_config=True)
        except Exception as error:
            self.drop()
            return Place(refusal=f"{type(error).__name__}: {error}")
        return Place(str(partial))


def plan_files(exporter: Exporter, max_shard_bytes: int) -> ExportPlan:
    """Pure: files of at most `max_shard_bytes`, dealt to the ranks of each stage."""
    tensors, topology = exporter.plan(as_stored=True).tensors, exporter.topology
    writers = topology.tp * topology.dp
    fair = -(-sum(tensor.nbytes for tensor in tensors) // (writers * topology.pp))
    return plan_export(
        tensors,
        min(max_shard_bytes, max(fair, _MIN_SHARD_BYTES)),
        writers,
    )
