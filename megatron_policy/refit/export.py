"""Makes whole Hugging Face tensors out of tensor-parallel shards, along the table's blocks; writes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows import fill_parts
from megatron_policy.converters.table import Entry


@torch.no_grad()
def gather_entries(
    held: Sequence[tuple[Entry, torch.Tensor]],
    architecture: Architecture,
    dtypes: Mapping[str, torch.dtype],
    group: dist.ProcessGroup,
    destination: int,
) -> dict[str, torch.Tensor]:
    """The HF tensors that these entries make up between them, on the CPU of rank `destination` of
    the tensor-parallel `group`; {} elsewhere.

    All entries have the same HF tensors, and together all elements of them. Collective over
    `group`. Each tensor has its dtype in `dtypes`.
    """
    here = group.rank() == destination
    first, _ = held[0]
    parts = [
        torch.empty(shape, dtype=dtypes[name])
        for name, shape in zip(first.hf, first.row.hf_shapes(architecture), strict=True)
        if here
    ]
    for entry, parameter in held:
        assert entry.hf == first.hf
        shards = _gather(parameter.data, entry.row.shard_dim, group, destination)
        for rank, shard in enumerate(shards) if here else ():
            fill_parts(entry.row, architecture, parts, shard, rank, len(shards))
    return dict(zip(first.hf, parts, strict=True)) if here else {}


def _gather(
    shard: torch.Tensor, shard_dim: int | None, group: dist.ProcessGroup, destination: int
) -> list[torch.Tensor]:
    """All shards in rank order on `destination`; a replicated parameter is its own only shard."""
    if shard_dim is None or group.size() == 1:
        return [shard]
    here = group.rank() == destination
    shards = [torch.empty_like(shard) for _ in range(group.size())] if here else []
    dist.gather(
        shard,
        shards or None,
        group=group,
        group_dst=destination,
    )
    return shards
