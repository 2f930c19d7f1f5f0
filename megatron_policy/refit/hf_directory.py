"""Writes directories of models and adapters: plans which tensors are in which file and who writes
it, before any byte moves, puts tensors into files, and says in a manifest what the directory has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.hf_writing import ShardFile
from megatron_policy.converters.formats.safetensors_format import Shape, encode
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.formats.digests import digest_bytes, digest_file, find_size
from megatron_policy.formats.manifest import DirectoryManifest
from megatron_policy.formats.tensors import Info
from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.digest import HOST, digest
from megatron_policy.refit.plan import RefitTensor

_SHOWN = 5

Upload = Callable[[Path, str], object]
"""Moves a complete file to where it belongs, under that name."""


@dataclass(frozen=True)
class ExportFile:
    """One file: its tensors in order, and which of its stage's writers writes it."""

    name: str
    stage: int
    writer: int
    tensors: tuple[RefitTensor, ...]

    @property
    def inventory(self) -> dict[str, tuple[torch.dtype, Shape]]:
        """Dtype and shape of each tensor by name."""
        return {tensor.name: (tensor.dtype, tensor.shape) for tensor in self.tensors}

    def find_writer(self, topology: Topology) -> int:
        """The global rank that writes it."""
        stage = topology.world_size // topology.pp
        return self.stage * stage + topology.gatherers[self.writer]


@dataclass(frozen=True)
class ExportPlan:
    """All files of an export: each tensor is in exactly one file, each file has one writer."""

    files: tuple[ExportFile, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors)

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name."""
        return {tensor.name: file.name for file in self.files for tensor in file.tensors}

    def numbered(self, following: int = 0) -> ExportPlan:
        """The same files under the names they have if `following` other files come after them."""
        count = len(self.files) + following
        named = (replace(f, name=file_name(i, count)) for i, f in enumerate(self.files))
        return ExportPlan(tuple(named))

    def followed_by(self, others: ExportPlan) -> ExportPlan:
        """These files and then the others, numbered together."""
        return ExportPlan((*self.files, *others.files)).numbered() if others.files else self


def plan_export(
    inventory: Sequence[RefitTensor], max_shard_size: int, writers: int = 1
) -> ExportPlan:
    """Assign tensors to files of at most `max_shard_size` bytes, and files to each stage's
    `writers`.

    A file holds tensors of one stage, in inventory order; a larger tensor gets its own file.
    """
    assert len({tensor.name for tensor in inventory}) == len(inventory), (
        "a tensor would be written twice"
    )
    files = [
        ExportFile("", stage, number % writers, shard)
        for stage, tensors in groupby(
            sorted(inventory, key=lambda t: t.stage), key=lambda t: t.stage
        )
        for number, shard in enumerate(_cut(tensors, max_shard_size))
    ]
    return ExportPlan(tuple(files)).numbered()


def file_name(index: int, count: int) -> str:
    """The name of file `index` (from 0) of `count`, as transformers expects it."""
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _cut(tensors: Iterable[RefitTensor], limit: int) -> list[tuple[RefitTensor, ...]]:
    """Consecutive runs of at most `limit` bytes, with at least one tensor each."""
    shards: list[list[RefitTensor]] = []
    left = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > left:
            shards.append([])
            left = limit
        shards[-1].append(tensor)
        left -= tensor.nbytes
    return [tuple(shard) for shard in shards]


class DirectoryWriter:
    """Puts the tensors of some files into a directory, one by one, in the order of their files."""

    def __init__(
        self,
        directory: Path,
        files: Iterable[ExportFile],
        alive: Callable[[], AbstractContextManager[None]] = nullcontext,
        upload: Upload | None = None,
    ) -> None:
        """It waits for the disk in the context that `alive` returns, and there `upload` takes each
        complete file away.
        """
        self._directory, self._alive, self._upload = directory, alive, upload
        placed = [(tensor, file) for file in files for tensor in file.tensors]
        self._file_of = {tensor.name: file for tensor, file in placed}
        self.largest_bytes = max((tensor.nbytes for tensor, _ in placed), default=0)
        """Bytes of the largest tensor."""
        self._open: dict[str, ShardFile] = {}

    def has(self, name: str) -> bool:
        """Whether that tensor is in one of the files."""
        return name in self._file_of

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; after the last of a file, wait until it is on the disk. OSError names the
        file.
        """
        file = self._file_of[name]
        if file.name not in self._open:
            self._open[file.name] = ShardFile(self._directory / file.name, file.inventory)
        self._open[file.name].put(name, tensor)
        if name == file.tensors[-1].name:
            with self._alive():
                self._open[file.name].complete()
                if self._upload is not None:
                    self._upload(self._directory / file.name, file.name)
            del self._open[file.name]

    def close(self) -> None:
        """Close all files, complete or not."""
        for file in self._open.values():
            file.close()


def upload_all(directory: Path, upload: Upload) -> None:
    """Upload every file that is in a directory."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            upload(path, path.relative_to(directory).as_posix())


@dataclass(frozen=True)
class CopiedTensors:
    """Tensors that an export copies unchanged from `source`, the checkpoint that the policy was
    read from: those of layers that the policy leaves out, which the copied config.json still
    counts.
    """

    source: str
    plan: ExportPlan

    @classmethod
    def of(
        cls, source: str, table: Table, known: Collection[str], max_shard_bytes: int
    ) -> CopiedTensors:
        """Those of the `known` tensors of `source` that the table carries; reads headers only, and
        nothing if there are none.

        ConfigError naming them if `source` does not have them.
        """
        names = [name for name in table.carried() if name in known]
        if not names:
            return cls(source, ExportPlan(()))
        try:
            with HfReader(source) as reader:
                shapes, dtypes = reader.shapes, reader.dtypes
        except ConversionError as error:
            raise _missing(source, names) from error
        if missing := [name for name in names if name not in shapes]:
            raise _missing(source, missing)
        tensors = [RefitTensor(name, shapes[name], dtypes[name]) for name in names]
        return cls(source, plan_export(tensors, max_shard_bytes))

    def write(self, directory: Path, files: Sequence[ExportFile]) -> dict[str, int]:
        """Write those `files`, which are of this plan, whatever their names; returns the digest of
        each tensor.
        """
        digests: dict[str, int] = {}
        writer = DirectoryWriter(directory, files)
        try:
            with HfReader(self.source) as reader:
                for name in (tensor.name for file in files for tensor in file.tensors):
                    tensor = reader.tensor(name)
                    writer.put(name, tensor)
                    digests[name] = digest(tensor, HOST)
        finally:
            writer.close()
        return digests


def _missing(source: str, names: Collection[str]) -> ConfigError:
    shown = ", ".join(list(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ConfigError(
        f"{source} no longer has {shown}{more}: an export copies the tensors of layers that the "
        "policy leaves out from there. Put the checkpoint's safetensors back"
    )


def describe_directory(
    root: Path,
    plan: ExportPlan,
    digests: Mapping[str, int],
    origin: Mapping[str, Any],
    step: int,
    overrides: Mapping[str, Any],
) -> DirectoryManifest:
    """The manifest of a written directory, with digests that cover every byte; `digests` are the
    tensors', as 64-bit numbers.
    """
    tensors = {
        tensor.name: (Info(tensor.dtype, tensor.shape), f"{digests[tensor.name] % 2**64:016x}")
        for file in plan.files
        for tensor in file.tensors
    }
    files = {file.name: digest_bytes(encode(file.inventory)[0]) for file in plan.files}
    others = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*"))}
    with RawFiles() as reader:
        files |= {
            name: digest_file(reader, path, find_size(path))
            for name, path in others.items()
            if path.is_file() and name not in files
        }
    return DirectoryManifest(tensors, files, origin, step, overrides)
