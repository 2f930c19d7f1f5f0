"""The planned checkpoint: its files, and where in them each tensor goes.

Paths are relative to the directory it will be written in; nothing is written yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from megatron_policy.adapters.peft_files import ADAPTER_MODEL
from megatron_policy.checkpoint.common_state import compose
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
from megatron_policy.converters.formats.safetensors_format import encode
from megatron_policy.converters.formats.stored import Stored
from megatron_policy.converters.rows.shards import unpadded_shape
from megatron_policy.converters.table import Table
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


def hf_target(
    infos: Mapping[str, Info], files: RawFiles, max_file_bytes: int, *, adapters: bool
) -> Target:
    """Safetensors of these tensors, in this order, with an index if there are several files. Of
    adapters it is one file, whatever its size: PEFT reads no others.
    """
    tensors = [RefitTensor(name, info.shape, info.dtype) for name, info in infos.items()]
    small: dict[str, bytes] = {}
    if adapters:
        plan = ExportPlan((ExportFile(ADAPTER_MODEL, 0, 0, tuple(tensors)),))
    else:
        plan = plan_export(tensors, max_file_bytes)
        if index := index_of(plan.weight_map, plan.total_bytes):
            small[INDEX] = index
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
    step: int = 0,
    ours: Mapping[str, Any] | None = None,
) -> Target:
    """A sharded checkpoint of these HF tensors, with the objects that Megatron-Core asks for; of a
    training checkpoint after that step also with `ours`, see `common_state.compose`.
    """
    arch, entries = table.architecture, table.exported()
    places = {entry.megatron: written(entry, arch) for entry in entries}
    # The dtype of each key represents all its tensors without loss.
    dtypes: dict[str, torch.dtype] = {}
    for entry in entries:
        for place in places[entry.megatron]:
            own = [infos[name].dtype for name in entry.hf]
            dtypes[place.key] = reduce(torch.promote_types, own, dtypes.get(place.key, own[0]))
    parameters = [
        Parameter(place, dtypes[place.key], unpadded_shape(entry.row, arch))
        for entry in entries
        for place in places[entry.megatron]
    ]
    layout = lay_out(parameters, extra_states(table), max_file_bytes)
    following = iter(layout.stored)
    stored = {name: tuple(islice(following, len(own))) for name, own in places.items()}
    extents: dict[Path, list[tuple[int, int]]] = {}
    for first_place, *_ in stored.values():
        for path, begin, end in first_place.extents():
            extents.setdefault(path, []).append((begin, end))
    return Target(
        ParameterTensors(shares_of(entries, arch, stored), files),
        layout.sizes,
        extents,
        tuple(framing_of(layout)),
        small_files(layout, compose(arch, step, ours)),
        {name: own[0].key for name, own in places.items()},
        layout,
    )
