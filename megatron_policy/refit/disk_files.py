"""One rank's files of a Hugging Face directory that all ranks write, and how it becomes complete.

Knows nothing of how tensors are gathered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_policy.conversion.digests import of_bytes
from megatron_policy.conversion.manifest import Manifest as DirectoryManifest
from megatron_policy.conversion.tensors import Info
from megatron_policy.converters import hf_writing, publishing
from megatron_policy.converters.hf_files import MANIFEST
from megatron_policy.converters.safetensors_format import Shape, encode
from megatron_policy.refit.buffers import Buffer, Room
from megatron_policy.refit.digest import HOST, algorithm_for, digest
from megatron_policy.refit.files import ExportFile, ExportPlan
from megatron_policy.refit.manifest import Manifest
from megatron_policy.version import VERSION

if TYPE_CHECKING:
    from megatron_policy.refit.disk import HfDirectory
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.plan import RefitTensor


class DirectoryOutlet:
    """A rank's end of an `HfDirectory`: writes its files, and on rank 0 publishes those of all.

    What goes wrong in a file is kept until `finish`: that is collective, and tells all ranks.
    """

    def __init__(
        self, sink: HfDirectory, exporter: Exporter, plan: ExportPlan, partial: Path
    ) -> None:
        """`partial` is the directory that all ranks write in."""
        self._sink, self._exporter, self._plan, self._partial = sink, exporter, plan, partial
        at, tp = exporter.coords, exporter.topology.tp
        writer = at.dp * tp + at.tp
        own = [f for f in plan.files if at.cp == 0 and (f.stage, f.writer) == (at.pp, writer)]
        self._file_of = {tensor.name: file for file in own for tensor in file.tensors}
        self._written: dict[str, hf_writing.ShardFile] = {}
        self._digests: dict[str, int] = {}
        largest = max((tensor.nbytes for file in own for tensor in file.tensors), default=0)
        self._failure: Exception | None = None
        try:
            self._buffer = Buffer.on(exporter.device, largest)
        except RuntimeError as error:
            self._failure = error

    def place(self, tensor: RefitTensor) -> Room | None:
        """See `delivery.Outlet`; None for what is in others' files."""
        if self._failure is not None or tensor.name not in self._file_of:
            return None
        return Room(self._buffer, 0)

    def filled(self, tensor: RefitTensor, room: Room) -> None:
        """See `delivery.Outlet`."""
        try:
            self._write(tensor.name, room.tensor(tensor.shape, tensor.dtype))
        except Exception as error:
            self._failure = error

    def finish(self, manifest: Manifest) -> None:
        """See `delivery.Outlet`; collective over all ranks."""
        if manifest.algorithm == HOST:
            self._digests = {name: sent.digest for name, sent in manifest.tensors.items()}
        names = list(self._plan.weight_map)
        told = torch.zeros(len(names) + 1, dtype=torch.int64)
        for index, name in enumerate(names):
            if name in self._digests:
                told[index] = _signed(self._digests[name])
        told[-1] = self._failure is not None
        told = told.to(self._exporter.device)
        self._exporter.sum(told)
        *digests, failed = told.tolist()
        if self._failure is not None:
            raise self._failure
        if failed == 0 and self._exporter.rank == 0:
            self._publish(dict(zip(names, digests, strict=True)), manifest.step)

    def close(self) -> None:
        """See `delivery.Outlet`; half a checkpoint goes."""
        for file in self._written.values():
            file.close()
        self._sink.drop()

    def _write(self, name: str, tensor: Tensor) -> None:
        file, host = self._file_of[name], tensor.cpu()
        if file.name not in self._written:
            path = self._partial / file.name
            self._written[file.name] = hf_writing.ShardFile(path, _forms(file))
        self._written[file.name].put(name, host)
        if algorithm_for(tensor) != HOST:  # else it is in the manifest that comes at the end
            self._digests[name] = digest(host, HOST)
        if name == file.tensors[-1].name:
            self._written[file.name].complete()
            del self._written[file.name]

    def _publish(self, digests: Mapping[str, int], step: int) -> None:
        found = directory_manifest(
            self._partial,
            self._sink.source,
            self._exporter.table.family,
            self._plan,
            digests,
            step,
        )
        publishing.write_file(self._partial / MANIFEST, found.encoded())
        self._sink.publish()


def directory_manifest(
    root: Path,
    source: str,
    family: str,
    plan: ExportPlan,
    digests: Mapping[str, int],
    step: int,
) -> DirectoryManifest:
    """What a written directory says of itself; `digests` of tensors, as signed 64-bit numbers."""
    tensors = {
        tensor.name: (Info(tensor.dtype, tensor.shape), f"{digests[tensor.name] % 2**64:016x}")
        for file in plan.files
        for tensor in file.tensors
    }
    files = {file.name: of_bytes(encode(_forms(file))[0]) for file in plan.files}
    others = (path for path in sorted(root.iterdir()) if path.name not in files)
    files |= {path.name: of_bytes(path.read_bytes()) for path in others}
    origin = {
        "package": f"megatron-policy {VERSION}",
        "direction": "policy -> hf",
        "source": {"path": source},
        "family": family,
        "config": json.loads((root / "config.json").read_bytes()),
    }
    return DirectoryManifest(tensors, files, origin, step)


def _forms(file: ExportFile) -> dict[str, tuple[torch.dtype, Shape]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors}


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
