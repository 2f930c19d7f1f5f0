"""Decides which HF tensors go into which file and who writes it, before any byte moves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.plan import RefitTensor


@dataclass(frozen=True)
class ExportFile:
    """One file: its tensors in order, and which of its stage's writers writes it."""

    name: str
    stage: int
    writer: int
    tensors: tuple[RefitTensor, ...]

    def rank_of(self, topology: Topology) -> int:
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
    shards = [
        (stage, number % writers, shard)
        for stage, tensors in groupby(
            sorted(inventory, key=lambda t: t.stage), key=lambda t: t.stage
        )
        for number, shard in enumerate(_cut(tensors, max_shard_size))
    ]
    return ExportPlan(
        tuple(
            ExportFile(file_name(index, len(shards)), stage, writer, shard)
            for index, (stage, writer, shard) in enumerate(shards)
        )
    )


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
