"""Writes adapters alone as a directory of Hugging Face PEFT, which engines load too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_policy.adapters.peft_files import ADAPTER_MODEL, peft_contents
from megatron_policy.converters.files import publishing
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.formats import hf_writing
from megatron_policy.converters.formats.hf_names import MANIFEST
from megatron_policy.converters.formats.safetensors_format import encode
from megatron_policy.errors import ConfigError, ExportError, RefitError
from megatron_policy.formats.digests import Digest, of_bytes
from megatron_policy.formats.manifest import DirectoryManifest
from megatron_policy.formats.tensors import Info
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.plan import RefitPlan
from megatron_policy.version import VERSION

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.plan import RefitTensor


def export_adapters(
    path: str | PathLike[str], exporter: Exporter, step: int, overwrite: bool = False
) -> None:
    """Write the adapters to `path`, as `PeftDirectory` does, after `step` optimizer steps.
    Collective: an error on one rank is raised on all.

    ConfigError if `path` is taken, ExportError if rank 0 cannot write; the policy is then unharmed
    and nothing is published.
    """
    transport = PeftDirectory(path, overwrite=overwrite)
    try:
        exporter.begin()
        own = _refusal(transport) if exporter.rank == 0 else None
        refusal = exporter.broadcast_text(own)
        if not refusal:
            deliver(exporter, transport, step, adapters=True)
            return
        exporter.leave_together()
    except RefitError as error:
        raise ExportError(str(error)) from error
    raise ConfigError(refusal)


def _refusal(transport: PeftDirectory) -> str:
    """Why its path cannot be taken; "" if it can."""
    try:
        publishing.check_replaceable(transport.path, transport.overwrite)
    except ConfigError as error:
        return str(error)
    return ""


class PeftDirectory:
    """A transport: a directory that `peft.PeftModel.from_pretrained` and engines load.

    Rank 0 writes it next to its final path and renames it when it is on the disk, so `path` either
    does not exist, is unchanged, or is complete. The directory's manifest has the step and digests
    that cover every byte.
    """

    def __init__(self, path: str | PathLike[str], *, overwrite: bool = False) -> None:
        """With `overwrite`, a checkpoint at `path` is replaced."""
        self.path, self.overwrite = expanded(path).absolute(), overwrite

    def plan(self, exporter: Exporter) -> RefitPlan | None:
        """The adapters, on the ranks that gather with rank 0. ConfigError for whole models."""
        if not exporter.only_adapters:
            raise ConfigError(
                "PeftDirectory writes adapters alone: refit with adapters=True, or take "
                "HfDirectory for whole models"
            )
        if exporter.topology.block_of(exporter.rank) != 0:
            return None
        return exporter.plan(as_stored=True)

    def open(self, exporter: Exporter, plan: RefitPlan) -> PeftSession | None:
        """Rank 0's end. ConfigError if the path is taken."""
        if exporter.rank != 0:
            return None
        assert exporter.adapters is not None, "its plan is of adapters"
        adapters, inventory = exporter.adapters, {t.name: (t.dtype, t.shape) for t in plan.tensors}
        contents = peft_contents(adapters.spec, adapters.table)
        others = len(encode(inventory)[0]) + sum(map(len, contents.values()))
        nbytes = plan.total_bytes + others
        publishing.check_room(self.path, nbytes)
        with _naming_disk(self.path, nbytes):
            staged = publishing.Staged([self.path], self.overwrite)
            try:
                return PeftSession(partial(_naming_disk, self.path, nbytes), staged, exporter, plan)
            except BaseException:
                staged.drop()
                raise


@contextmanager
def _naming_disk(path: Path, nbytes: int) -> Iterator[None]:
    """Turn an OSError of the body into an ExportError with the path, and `nbytes` if the disk is
    full.
    """
    try:
        yield
    except OSError as error:
        raise publishing.not_written(path, error, nbytes) from error


class PeftSession:
    """Rank 0's end of a `PeftDirectory`: writes tensors in turn, then publishes."""

    def __init__(
        self,
        naming: Callable[[], AbstractContextManager[None]],
        staged: publishing.Staged,
        exporter: Exporter,
        plan: RefitPlan,
    ) -> None:
        """What `naming` returns turns an OSError of its body into an ExportError."""
        self._naming = naming
        assert exporter.adapters is not None, "its plan is of adapters"
        (self._partial,), self._staged, self._exporter = staged.partials, staged, exporter
        self._spec, self._table = exporter.adapters.spec, exporter.adapters.table
        self._infos = {t.name: Info(t.dtype, t.shape) for t in plan.tensors}
        self._digests: dict[str, str] = {}
        self._buffer = Buffer.on(exporter.device, plan.largest_bytes)
        path, inventory = self._partial / ADAPTER_MODEL, self._inventory
        self._file = hf_writing.ShardFile(path, inventory)

    def place(self, tensor: RefitTensor) -> BufferSlice:
        """See `delivery.TransportSession`."""
        return BufferSlice(self._buffer, 0)

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        """See `delivery.TransportSession`."""
        host = target.tensor(tensor.shape, tensor.dtype).cpu()
        with self._naming():
            self._file.put(tensor.name, host)
        digest = Digest()
        digest.update(host.reshape(-1))
        self._digests[tensor.name] = digest.text()

    def finish(self, manifest: RefitManifest) -> None:
        """See `delivery.TransportSession`."""
        with self._naming(), self._exporter.alive():  # for ranks that wait: the disk may be slow
            self._file.complete()
            contents = peft_contents(self._spec, self._table)
            for name, content in contents.items():
                publishing.write_file(self._partial / name, content)
            stated = self._manifest(contents, manifest.step)
            publishing.write_file(self._partial / MANIFEST, stated.encoded())
            self._staged.publish()

    def close(self) -> None:
        """See `delivery.TransportSession`; an incomplete directory is removed."""
        self._file.close()
        self._staged.drop()

    @property
    def _inventory(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (info.dtype, info.shape) for name, info in self._infos.items()}

    def _manifest(self, contents: dict[str, bytes], step: int) -> DirectoryManifest:
        """Digests that cover every byte of the directory, and where it comes from."""
        tensors = {name: (info, self._digests[name]) for name, info in self._infos.items()}
        files = {ADAPTER_MODEL: of_bytes(encode(self._inventory)[0])}
        files |= {name: of_bytes(content) for name, content in contents.items()}
        origin = {
            "package": f"megatron-policy {VERSION}",
            "direction": "policy -> peft",
            "source": {"path": self._spec.model},
            "family": self._table.family,
            "config": self._spec.peft_config(self._table),
        }
        return DirectoryManifest(tensors, files, origin, step, self._spec.overrides)
