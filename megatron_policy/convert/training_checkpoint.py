"""What conversion reads and writes of a training checkpoint besides its tensors."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_policy.adapters.table import AdapterSpec
from megatron_policy.checkpoint import common_state, manifest, tracker, verifying
from megatron_policy.checkpoint.manifest import ByteRange, CheckpointManifest
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dist_writing import DistLayout
from megatron_policy.converters.table import Table
from megatron_policy.dtypes import name_dtype
from megatron_policy.errors import CheckpointError, ConversionError
from megatron_policy.formats.digests import digest_spans
from megatron_policy.formats.tensors import Info
from megatron_policy.parallel.topology import Topology

CHECKPOINT = manifest.NAME


@dataclass(frozen=True)
class SavedState:
    """What a training checkpoint says besides its tensors."""

    step: int
    overrides: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype]
    """The dtypes that the weights had in Hugging Face format."""
    of_adapters: bool
    """Whether it has adapters alone."""


def is_saved(root: Path) -> bool:
    """Whether it is a training checkpoint that a policy saved, with its own kind of digests."""
    return tracker.is_saved(root)


def saved_state(root: Path) -> SavedState:
    """What a training checkpoint says; ConversionError if it is damaged."""
    try:
        stated, of_adapters = manifest.read(root), "adapters_of" in common_state.read_ours(root)
        dtypes = common_state.source_dtypes(root)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
    return SavedState(stated.step, stated.overrides, dtypes, of_adapters)


def check_bytes(root: Path) -> None:
    """Raise ConversionError, naming the first, if any bytes of a training checkpoint differ from
    those that were saved. Its digests are of records, not of tensors.
    """
    if not is_saved(root):
        return
    try:
        verifying.verify(root)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error


def state_of_adapters(spec: AdapterSpec, table: Table, infos: Mapping[str, Info]) -> dict[str, Any]:
    """Our entry in the common state of a training checkpoint of adapters alone, as a policy writes
    it.
    """
    return {
        "host_data": {},
        "adapters_of": spec.identity(table),
        "source_dtypes": {name: name_dtype(info.dtype) for name, info in infos.items()},
    }


def encoded_manifest(
    writer: RawFiles,
    layout: DistLayout,
    table: Table,
    spec: AdapterSpec,
    files: Mapping[str, str],
    step: int,
) -> bytes:
    """The manifest of a training checkpoint of adapters alone whose other files are written;
    `files` are the digests of those without tensors.
    """
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    records: defaultdict[str, list[ByteRange]] = defaultdict(list)
    for record in layout.records:
        span = record.offset, record.offset + record.length
        digest = digest_spans(writer, record.path, [span])
        records[record.path.as_posix()].append(ByteRange(record.offset, record.length, digest))
        if record.dtype is not None:
            tensors[record.key] = (record.dtype, layout.shapes[record.key])
    return CheckpointManifest(
        id=uuid.uuid4().hex,
        step=step,
        contains=(manifest.WEIGHTS,),
        optimizer_elsewhere=False,
        **manifest.identify(table, Topology()),
        tensors=tensors,
        records={name: tuple(ranges) for name, ranges in records.items()},
        files={name: each for name, each in files.items() if name not in records},
        overrides=spec.overrides,
    ).encode()
