"""Writes adapters alone as a directory of Hugging Face PEFT, which engines load too."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_policy.adapters.peft_files import ADAPTER_MODEL, peft_contents
from megatron_policy.adapters.stacks import fit_to_peft
from megatron_policy.converters.files.publishing import write_file
from megatron_policy.converters.formats.safetensors_format import encode
from megatron_policy.errors import ConfigError
from megatron_policy.formats.manifest import describe_origin
from megatron_policy.refit.hf_directory import ExportFile, ExportPlan
from megatron_policy.refit.plan import RefitPlan
from megatron_policy.refit.transports.disk import DirectoryTransport, ExportContents

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter


class PeftDirectory(DirectoryTransport):
    """A directory that `peft.PeftModel.from_pretrained` and engines load, whose one file with
    tensors rank 0 writes; see `DirectoryTransport`.
    """

    def __init__(self, path: str | PathLike[str], *, overwrite: bool = False) -> None:
        """With `overwrite`, a checkpoint at `path` is replaced."""
        super().__init__(path, overwrite)

    def plan(self, exporter: Exporter) -> RefitPlan:
        """The adapters, on the ranks that gather with rank 0. ConfigError for whole models, and for
        adapters that PEFT cannot read.
        """
        if exporter.served_model.adapters is None:
            raise ConfigError(
                "PeftDirectory writes adapters alone: refit with adapters=True, or take "
                "HfDirectory for whole models"
            )
        _fit(exporter)
        if exporter.topology.block_of(exporter.rank) != 0:
            return RefitPlan((), (exporter.coords.pp,), exporter.bucket_bytes)
        return exporter.plan(as_stored=True)

    def _files(self, exporter: Exporter) -> ExportPlan:
        tensors = exporter.plan(as_stored=True).tensors
        return ExportPlan((ExportFile(ADAPTER_MODEL, 0, 0, tensors),))

    def _collect(self, exporter: Exporter, files: ExportPlan) -> ExportContents:
        """What the adapters are, and of which base."""
        assert exporter.adapters is not None, "its plan is of adapters"
        spec, fields = exporter.adapters.spec, _fit(exporter)
        contents = peft_contents(spec, fields)
        origin = describe_origin(
            "policy -> peft", {"path": spec.model}, exporter.table.family, fields
        )
        header = len(encode(files.files[0].inventory)[0])
        nbytes = files.total_bytes + header + sum(map(len, contents.values()))

        def write(directory: Path) -> None:
            for name, content in contents.items():
                write_file(directory / name, content)

        return ExportContents(nbytes, origin, write)


def _fit(exporter: Exporter) -> dict[str, Any]:
    fields = exporter.served_model.adapters
    assert fields is not None, "its plan is of adapters"
    return fit_to_peft(fields, exporter.table)
