"""Tensors that an export copies unchanged from the checkpoint that the policy was read from: those
of layers that the policy leaves out, which the copied config.json still counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.hf_writing import ShardFile
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.refit.digest import HOST, digest
from megatron_policy.refit.file_plan import ExportFile, ExportPlan, plan_export
from megatron_policy.refit.plan import RefitTensor

_SHOWN = 5


@dataclass(frozen=True)
class CarriedTensors:
    """The files of an export that hold such tensors; `source` is where the bytes come from."""

    source: str
    plan: ExportPlan

    @classmethod
    def of(
        cls, source: str, table: Table, known: Collection[str], max_shard_bytes: int
    ) -> CarriedTensors:
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

    def after(self, files: ExportPlan) -> ExportPlan:
        """The plan of the whole export: `files` and then these, numbered together."""
        return ExportPlan((*files.files, *self.plan.files)).numbered()

    def write(self, directory: Path, files: Iterable[ExportFile]) -> Iterator[tuple[str, int]]:
        """Write those `files`, which are of this plan, whatever their names; yields the name and
        the digest of each tensor.
        """
        with HfReader(self.source) as reader:
            for file in files:
                inventory = {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors}
                shard = ShardFile(directory / file.name, inventory)
                try:
                    for name in inventory:
                        tensor = reader.tensor(name)
                        shard.put(name, tensor)
                        yield name, digest(tensor, HOST)
                    shard.complete()
                finally:
                    shard.close()


def _missing(source: str, names: Collection[str]) -> ConfigError:
    shown = ", ".join(list(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ConfigError(
        f"{source} no longer has {shown}{more}: an export copies the tensors of layers that the "
        "policy leaves out from there. Put the checkpoint's safetensors back"
    )
