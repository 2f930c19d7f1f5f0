"""Makes whole Hugging Face tensors out of tensor-parallel shards, along the table's blocks; writes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows import fill_parts
from megatron_policy.converters.table import Entry


@torch.no_grad()
def gather_entry(
    entry: Entry,
    parameter: torch.nn.Parameter,
    architecture: Architecture,
    dtypes: Mapping[str, torch.dtype],
    group: dist.ProcessGroup,
    destination: int,
) -> dict[str, torch.Tensor]:
    """The HF tensors of one entry, on the CPU of rank `destination` of the tensor-parallel `group`;
    {} elsewhere.

    Collective over `group`. Each tensor has its dtype in `dtypes`.
    """
    here = group.rank() == destination
    shards = _gather(parameter.data, entry.row.shard_dim, group, destination)
    if not here:
        return {}
    shapes = entry.row.hf_shapes(architecture)
    parts = [
        torch.empty(shape, dtype=dtypes[name]) for name, shape in zip(entry.hf, shapes, strict=True)
    ]
    for rank, shard in enumerate(shards):
        fill_parts(entry.row, architecture, parts, shard, rank, len(shards))
    return dict(zip(entry.hf, parts, strict=True))


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
