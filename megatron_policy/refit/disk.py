"""Writes the policy as a Hugging Face checkpoint directory, every rank its files; knows no
optimizer and no engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_policy.converters import hf_writing, publishing
from megatron_policy.converters.table import EMBEDDING, HEAD, Entry
from megatron_policy.errors import ConfigError, ExportError
from megatron_policy.refit.export import gather_entries
from megatron_policy.refit.plan import ExportFile, ExportPlan, ExportTensor, plan_export

if TYPE_CHECKING:
    from megatron_policy.model.assemble import Assembly

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
# A stage's ranks share its tensors out between them, but not into files smaller than this.
_MIN_SHARD_BYTES = 64 * 2**20


def export_checkpoint(
    path: str | PathLike[str],
    assembly: Assembly,
    source: str,
    max_shard_bytes: int,
    overwrite: bool,
) -> None:
    """Write config, tokenizer and weights to `path`; collective, and an error of one rank is raised
    on all.

    A rank holds one gathered tensor at a time. The directory is written beside its final name and
    renamed when every file is on the disk, so `path` either does not exist, is what it was, or is
    complete. ConfigError for a `path` that is taken, ExportError when a rank cannot write.
    """
    plan = plan_files(assembly, max_shard_bytes)
    rank_zero = dist.get_rank() == 0
    partial = publishing.partial_dir(path)

    def prepare() -> None:
        if rank_zero:
            publishing.stage(path, overwrite)
            hf_writing.copy_side_files(source, partial)
            hf_writing.write_index(partial, plan.weight_map, plan.total_bytes)

    def finish() -> None:
        if rank_zero:
            publishing.publish(partial, path, overwrite)

    _together(prepare)
    try:
        _together(lambda: _write_files(assembly, plan, partial))
        _together(finish)
    except (ConfigError, ExportError):
        # Half a checkpoint is of no use to anybody, and may be what has filled the disk.
        if rank_zero:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def plan_files(assembly: Assembly, max_shard_bytes: int) -> ExportPlan:
    """The same plan on every rank: which tensor goes into which file, and which rank of its stage
    writes it.
    """
    shapes = assembly.table.hf_shapes()
    stages = {
        name: _stage_of(entry, assembly) for entry in assembly.table.exported() for name in entry.hf
    }
    inventory = [
        ExportTensor(name, shapes[name], assembly.source_dtypes[name], stage)
        for name, stage in stages.items()
    ]
    topology = assembly.place.topology
    writers = topology.tp * topology.dp
    total = sum(tensor.nbytes for tensor in inventory)
    fair = -(-total // (writers * topology.pp))
    return plan_export(inventory, min(max_shard_bytes, max(fair, _MIN_SHARD_BYTES)), writers)


def _stage_of(entry: Entry, assembly: Assembly) -> int:
    place = assembly.place
    if entry.where == EMBEDDING:
        return 0
    if entry.where == HEAD:
        return place.topology.pp - 1
    assert entry.layer is not None
    return place.split.owner(entry.layer)[0]


def _write_files(assembly: Assembly, plan: ExportPlan, directory: Path) -> None:
    """This rank's part in its stage's files: the replica whose writer a file has gathers, the
    writer writes.
    """
    coords, tp = assembly.place.coords, assembly.place.topology.tp
    failure: Exception | None = None
    for file in plan.files:
        replica, writer = divmod(file.writer, tp)
        if (file.stage, replica) != (coords.pp, coords.dp):
            continue
        tensors = _gathered(assembly, file, writer)
        if writer != coords.tp or failure is not None:
            for _ in tensors:  # the others count on this rank's shards
                pass
            continue
        try:
            hf_writing.write_shard(
                directory, file.name, {t.name: (t.dtype, t.shape) for t in file.tensors}, tensors
            )
        except Exception as error:
            failure = error
            for _ in tensors:
                pass
    if failure is not None:
        raise failure


def _gathered(
    assembly: Assembly, file: ExportFile, writer: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors one after another, on the tensor-parallel rank `writer`; nothing, after
    the same work, elsewhere.
    """
    wanted = {tensor.name for tensor in file.tensors}
    owned = (pair for pair in assembly.held if pair[0].row.owns)
    # The experts that one HF tensor stacks follow each other.
    for names, held in groupby(owned, key=lambda pair: pair[0].hf):
        if wanted.isdisjoint(names):
            continue
        parts = gather_entries(
            tuple(held),
            assembly.table.architecture,
            assembly.source_dtypes,
            assembly.groups.tp,
            writer,
        )
        yield from ((name, part) for name, part in parts.items() if name in wanted)


def _together(step: Callable[[], None]) -> None:
    """Run `step` on every rank; if it fails on any, raise on all, so that nobody waits for a rank
    that has given up.
    """
    failure: Exception | None = None
    try:
        step()
    except Exception as error:
        failure = error
    said = None if failure is None else (isinstance(failure, ConfigError), _words(failure))
    answers: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, said)
    for rank, answer in enumerate(answers):
        if answer is not None:
            refused, words = answer
            kind = ConfigError if refused else ExportError
            raise kind(words if refused else f"rank {rank}: {words}") from failure


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
