"""Plans a conversion, before any tensor is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_policy.convert.bases import bring_base, describe_adapters, name_keys
from megatron_policy.convert.blockwise import Blocks, check_memory, cut
from megatron_policy.convert.open_checkpoint import (
    HF,
    MCORE,
    PEFT,
    SIDE,
    OpenCheckpoint,
    open_checkpoint,
)
from megatron_policy.convert.planned import ConversionPlan, PlannedTensor
from megatron_policy.convert.target import Target, hf_target, mcore_target
from megatron_policy.convert.training_checkpoint import is_saved, state_of_adapters
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.hf_config import written_config
from megatron_policy.converters.formats.hf_overrides import in_kind
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.table import WEIGHT_DTYPES, Table
from megatron_policy.dtypes import name_dtype
from megatron_policy.errors import ConfigError
from megatron_policy.formats.tensors import Info

DEFAULT_MAX_MEMORY = 2 * 2**30
DEFAULT_MAX_SHARD_SIZE = 5 * 10**9

_DTYPES = {name_dtype(dtype): dtype for dtype in WEIGHT_DTYPES}
_DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Prepared:
    """A plan with what is needed to carry it out; `reader` and `writer` open files on first use."""

    plan: ConversionPlan
    source: OpenCheckpoint
    table: Table
    target: Target
    reader: RawFiles
    writer: RawFiles
    infos: Mapping[str, Info]
    """Of each tensor, as it will be written."""
    blocks: Mapping[str, Blocks]
    max_memory: int


@contextmanager
def prepare(
    source: str | Path,
    destination: str | Path,
    to: str,
    dtype: torch.dtype | str | None,
    max_memory: int,
    max_shard_size: int,
    config: str | Path | None,
    base: str | Path | None,
    merge: bool,
    overrides: Mapping[str, Any] | None,
) -> Iterator[Prepared]:
    """Open the source, check it and plan the conversion; closes files at the end.

    ConfigError for a request that cannot be met, ConversionError for a source that is damaged or
    not a model as its config says.
    """
    cast_to = parse_dtype(dtype)
    check_memory(max_memory)
    if to not in (HF, MCORE):
        raise ConfigError(f"to is {to!r}; it must be '{HF}' or '{MCORE}'")
    if max_shard_size < 1:
        raise ConfigError(f"max_shard_size is {max_shard_size}; it must be a number of bytes")
    with RawFiles() as reader, RawFiles(writable=True) as writer:
        checkpoint = open_checkpoint(source, reader, config or None)
        _check_directions(checkpoint, Path(destination), to, merge)
        if config and checkpoint.kind == HF:
            raise ConfigError(f"{checkpoint.root} has a config.json of its own: leave --config out")
        if config and checkpoint.adapters is not None:
            raise ConfigError(f"{checkpoint.root} has adapters: give base= instead")
        checkpoint = _overridden(checkpoint, overrides or {})
        checkpoint.check()
        checkpoint = bring_base(checkpoint, base, merge, cast_to, reader)
        _check_apart(Path(destination), checkpoint, base)
        table = _bound(checkpoint)
        kept = {name for entry in table.exported() if entry.row.keeps_dtype for name in entry.hf}
        # Megatron-Core has each tensor once; copies of the embedding and the head are left out.
        entries = table.exported() if to == MCORE else table.sent(checkpoint.infos)
        names = dict.fromkeys(name for entry in entries for name in entry.hf)
        infos = {
            name: Info(info.dtype if name in kept else cast_to or info.dtype, info.shape)
            for name, info in checkpoint.infos.items()
            if name in names
        }
        in_order = {name: infos[name] for name in names}
        target = _plan_target(checkpoint, table, in_order, to, writer, max_shard_size)
        blocks = {
            name: _cut(name, info, checkpoint, target, max_memory) for name, info in infos.items()
        }
        yield Prepared(
            _plan(checkpoint, destination, to, table, target, infos, blocks),
            checkpoint,
            table,
            target,
            reader,
            writer,
            infos,
            blocks,
            max_memory,
        )


def plan_conversion(
    source: str | Path,
    destination: str | Path,
    to: str,
    dtype: torch.dtype | str | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE,
    config: str | Path | None = None,
    base: str | Path | None = None,
    merge: bool = False,
    hf_config_overrides: Mapping[str, Any] | None = None,
) -> ConversionPlan:
    """What `convert` would do with these arguments; same errors, but writes nothing."""
    given = (to, dtype, max_memory, max_shard_size, config, base, merge, hf_config_overrides)
    with prepare(source, destination, *given) as ready:
        return ready.plan


def _overridden(checkpoint: OpenCheckpoint, overrides: Mapping[str, Any]) -> OpenCheckpoint:
    """The checkpoint with other values for fields of its config.json; ConfigError if it is not a
    Hugging Face model.
    """
    if not overrides:
        return checkpoint
    if checkpoint.kind != HF:
        raise ConfigError(
            f"{checkpoint.root} is no Hugging Face model, whose config.json hf_config_overrides "
            "changes: leave them out"
        )
    written = written_config(checkpoint.root)
    changed = in_kind(overrides, written, written)
    return replace(checkpoint, overrides={**checkpoint.overrides, **changed})


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of that name; ConfigError if weights cannot have it."""
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in WEIGHT_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it can be {', '.join(_DTYPES)}")
    return found


def _check_directions(checkpoint: OpenCheckpoint, destination: Path, to: str, merge: bool) -> None:
    """ConfigError if nothing would change, or the destination is not apart from the source."""
    same = checkpoint.kind == to or (checkpoint.kind == PEFT and to == HF)
    if same and not merge:
        other = MCORE if to == HF else HF
        merges = "; merge=True adds it to its base" if checkpoint.adapters else ""
        raise ConfigError(
            f"{checkpoint.root} is in the format {to!r} already; to='{other}' converts it to the "
            f"other{merges}"
        )
    _check_apart(destination, checkpoint)


def _check_apart(
    destination: Path, checkpoint: OpenCheckpoint, base: str | Path | None = None
) -> None:
    """ConfigError if the destination overlaps what is converted, or the base of adapters."""
    final = Path(os.path.realpath(expanded(destination)))
    named = None if checkpoint.spec is None else checkpoint.spec.model
    for source in (checkpoint.root, base, named):
        if source is None:
            continue
        root = Path(os.path.realpath(expanded(source)))
        if source is not checkpoint.root and not root.exists():
            continue  # a name of the hub, or a path of another machine
        if final.is_relative_to(root) or root.is_relative_to(final):
            raise ConfigError(f"{destination} is inside {source}, or contains it: choose another")


def _bound(checkpoint: OpenCheckpoint) -> Table:
    """The source's table; ConversionError unless the source is a model of it."""
    table = checkpoint.table
    shapes = {name: info.shape for name, info in checkpoint.infos.items()}
    if checkpoint.kind == HF and checkpoint.merged is None:
        # Again, to raise the error if there is one.
        table = open_model(checkpoint.root, checkpoint.overrides, tensors=shapes).table
    assert table is not None
    table.check_hf(shapes, {name: info.dtype for name, info in checkpoint.infos.items()})
    return table


def _plan_target(
    checkpoint: OpenCheckpoint,
    table: Table,
    infos: Mapping[str, Info],
    to: str,
    writer: RawFiles,
    max_shard_size: int,
) -> Target:
    spec = checkpoint.spec
    if to == HF:
        return hf_target(infos, writer, max_shard_size, adapters=spec is not None)
    if spec is None:
        return mcore_target(table, infos, writer, max_shard_size)
    ours = state_of_adapters(spec, table, infos)
    return mcore_target(table, infos, writer, max_shard_size, checkpoint.step or 0, ours)


def _cut(
    name: str, written: Info, checkpoint: OpenCheckpoint, target: Target, max_memory: int
) -> Blocks:
    read = checkpoint.infos[name]
    copies = tuple(dict.fromkeys((read.dtype, written.dtype)))
    scratch = max(
        checkpoint.tensors.scratch(name, read.dtype), target.tensors.scratch(name, written.dtype)
    )
    return cut(read, copies, scratch, max_memory)


def _plan(
    checkpoint: OpenCheckpoint,
    destination: str | Path,
    to: str,
    table: Table,
    target: Target,
    infos: Mapping[str, Info],
    blocks: Mapping[str, Blocks],
) -> ConversionPlan:
    known = checkpoint.keys or target.keys
    keys: dict[str, dict[str, None]] = {}
    for entry in table.sent(table.ignored):
        for name in entry.hf:
            if entry.megatron in known:  # of a model that is merged there are none
                keys.setdefault(name, {})[known[entry.megatron]] = None
    stored = [checkpoint.quantised[name] for name in infos if name in checkpoint.quantised]
    return ConversionPlan(
        source=checkpoint.root,
        destination=Path(destination),
        to=to,
        family=table.family,
        tensors=tuple(
            PlannedTensor(
                name, info.shape, checkpoint.infos[name].dtype, info.dtype, (*keys.get(name, ()),)
            )
            for name, info in infos.items()
        ),
        dropped=tuple(name for name in checkpoint.infos if name not in infos),
        files=tuple((path.as_posix(), size) for path, size in target.sizes.items()),
        side_files=(
            *target.small,
            *(side_path(name, to) for name in (*checkpoint.side_files, *checkpoint.contents)),
        ),
        bytes_read=sum(
            (checkpoint.quantised.get(name) or checkpoint.infos[name]).nbytes for name in infos
        ),
        bytes_written=sum(target.sizes.values()) + sum(map(len, target.small.values())),
        buffer_bytes=max(block.nbytes for block in blocks.values()),
        has_digests=checkpoint.manifest is not None or is_saved(checkpoint.root),
        dequantised=f"{len(stored)} tensors from {stored[0].scheme} to bfloat16" if stored else "",
        adapters=describe_adapters(checkpoint),
        resumed_with=name_keys(checkpoint) if to == MCORE else "",
    )


def side_path(name: str, to: str) -> str:
    """The path of a file that only Hugging Face has, in a checkpoint of format `to`."""
    return name if to == HF else f"{SIDE}/{name}"
