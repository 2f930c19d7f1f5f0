"""Writes the policy as a Hugging Face checkpoint directory, every rank its files; knows no
optimizer and no engine.
"""

from __future__ import annotations

import json
from os import PathLike
from typing import TYPE_CHECKING

import torch

from megatron_policy.converters import hf_writing, publishing
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
_REFUSAL = "refit/directory"  # where rank 0 says why there is none to write in


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
        refusal = sink.prepare(exporter)
        if refusal is None:
            deliver(exporter, sink, step)
            return
    except RefitError as error:
        raise ExportError(str(error)) from error
    is_config, words = refusal
    raise ConfigError(words) if is_config else ExportError(f"rank 0: {words}")


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
        self.partial = publishing.partial_dir(path)
        self._max_shard_bytes = max_shard_bytes
        self._files: tuple[Exporter, ExportPlan] | None = None
        self._refusal: tuple[bool, str] | None = None
        self._is_prepared = False

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

    def prepare(self, exporter: Exporter) -> tuple[bool, str] | None:
        """Make the directory to write in; collective over all ranks, to which it returns the same:
        None, or whether it is `path` that is not accepted, and the words for it.
        """
        refusal = self._make(exporter) if exporter.rank == 0 else None
        if refusal is not None:
            exporter.store.set(_REFUSAL, json.dumps(refusal))
        refused = torch.tensor([refusal is not None], dtype=torch.int64, device=exporter.device)
        exporter.sum(refused)
        if refused.item():
            is_config, words = json.loads(exporter.store.get(_REFUSAL))
            refusal = (is_config, words)
        self._refusal, self._is_prepared = refusal, True
        return refusal

    def open(self, exporter: Exporter, plan: RefitPlan) -> DirectoryOutlet | None:
        """This rank's files, of which it may have none; RefitError on rank 0 alone when there is no
        directory to write in.
        """
        if not self._is_prepared:
            self.prepare(exporter)
        self._is_prepared = False
        if self._refusal is None:
            return DirectoryOutlet(self, exporter, self.files(exporter))
        if exporter.rank == 0:
            raise RefitError(self._refusal[1])
        return None

    def _make(self, exporter: Exporter) -> tuple[bool, str] | None:
        files = self.files(exporter)
        try:
            publishing.stage(self.path, self.overwrite)
            hf_writing.copy_side_files(self.source, self.partial)
            hf_writing.write_index(self.partial, files.weight_map, files.total_bytes)
        except ConfigError as error:
            return True, str(error)
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"
        return None


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
