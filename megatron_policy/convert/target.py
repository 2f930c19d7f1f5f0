"""The planned checkpoint: its files, and where in them each tensor goes.

Paths are relative to the directory it will be written in; nothing is written yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from megatron_policy.convert.open_checkpoint import Extents
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dist_keys import extra_states, written
from megatron_policy.converters.formats.dist_writing import (
    DistLayout,
    Parameter,
    framing_of,
    lay_out,
    small_files,
)
from megatron_policy.converters.formats.hf_names import INDEX
from megatron_policy.converters.formats.hf_writing import index_of
from megatron_policy.converters.formats.peft_files import ADAPTER_MODEL
from megatron_policy.converters.formats.safetensors_format import encode
from megatron_policy.converters.formats.stored import Stored
from megatron_policy.converters.rows.shards import unpadded_shape
from megatron_policy.converters.table import Entry, Table
from megatron_policy.formats.tensors import (
    FileTensors,
    Info,
    ParameterTensors,
    Tensors,
    shares_of,
)
from megatron_policy.refit.hf_directory import ExportFile, ExportPlan, plan_export
from megatron_policy.refit.plan import RefitTensor


@dataclass(frozen=True)
class Target:
    """Everything that will be written, except side files and manifest."""

    tensors: Tensors
    sizes: Mapping[Path, int]
    """Bytes of each file that holds tensors."""
    extents: Extents
    framing: Iterable[tuple[Path, int, bytes]]
    """(file, offset, bytes) of everything in those files that is not a tensor."""
    small: Mapping[str, bytes]
    """The other files, in the order to write them."""
    keys: Mapping[str, str]
    """For a Megatron-Core checkpoint, where each parameter is: canonical name -> key."""
    layout: DistLayout | None = None
    """Its records."""


def peft_target(infos: Mapping[str, Info], files: RawFiles) -> Target:
    """The one file of adapters, whatever its size: PEFT reads no others."""
    tensors = tuple(RefitTensor(name, info.shape, info.dtype) for name, info in infos.items())
    return _safetensors(ExportPlan((ExportFile(ADAPTER_MODEL, 0, 0, tensors),)), files, {})


def hf_target(infos: Mapping[str, Info], files: RawFiles, max_file_bytes: int) -> Target:
    """Safetensors of these tensors, in this order, with an index if there are several files."""
    plan = plan_export(
        [RefitTensor(name, info.shape, info.dtype) for name, info in infos.items()],
        max_file_bytes,
    )
    index = index_of(plan.weight_map, plan.total_bytes)
    return _safetensors(plan, files, {} if index is None else {INDEX: index})


def _safetensors(plan: ExportPlan, files: RawFiles, small: Mapping[str, bytes]) -> Target:
    stored: dict[str, Stored] = {}
    sizes, framing = {}, []
    extents: dict[Path, list[tuple[int, int]]] = {}
    for file in plan.files:
        path = Path(file.name)
        header, places = encode(file.inventory)
        framing.append((path, 0, header))
        sizes[path] = max((at.end for at in places.values()), default=len(header))
        for name, at in places.items():
            stored[name] = Stored.in_one_piece(at.shape, at.dtype, path, at.start)
            extents.setdefault(path, []).append((at.start, at.end))
    return Target(FileTensors(stored, files), sizes, extents, framing, small, {})


def mcore_target(
    table: Table,
    infos: Mapping[str, Info],
    files: RawFiles,
    max_file_bytes: int,
    state: Mapping[str, Any],
) -> Target:
    """A sharded checkpoint of these HF tensors, with the objects that Megatron-Core asks for;
    `state` is added to its common state.
    """
    arch, entries = table.architecture, table.exported()
    dtypes = _dtypes(table, infos)
    parameters: list[Parameter] = []
    counts: dict[str, int] = {}
    for entry in entries:
        shape = unpadded_shape(entry.row, arch)
        places = written(entry, arch)
        parameters += [Parameter(place, dtypes[place.key], shape) for place in places]
        counts[entry.megatron] = len(places)
    layout = lay_out(parameters, extra_states(table), max_file_bytes)
    following = iter(layout.stored)
    stored = {name: tuple(next(following) for _ in range(count)) for name, count in counts.items()}
    extents: dict[Path, list[tuple[int, int]]] = {}
    for first_place, *_ in stored.values():
        for path, begin, end in first_place.extents():
            extents.setdefault(path, []).append((begin, end))
    common = {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {
            "singleton_local_shards": False,
            "non_homogeneous_layers": not arch.uniform_layers,
        },
        **state,
    }
    return Target(
        ParameterTensors(shares_of(entries, arch, stored), files),
        layout.sizes,
        extents,
        tuple(framing_of(layout)),
        small_files(layout, common),
        {entry.megatron: written(entry, arch)[0].key for entry in entries},
        layout,
    )


def _dtypes(table: Table, infos: Mapping[str, Info]) -> dict[str, torch.dtype]:
    """The dtype of each key: one that represents all its tensors without loss."""
    held: dict[str, list[Entry]] = {}
    for entry in table.exported():
        for place in written(entry, table.architecture):
            held.setdefault(place.key, []).append(entry)
    return {
        key: reduce(
            torch.promote_types, {infos[name].dtype for entry in entries for name in entry.hf}
        )
        for key, entries in held.items()
    }
