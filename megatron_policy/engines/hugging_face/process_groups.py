"""The process groups and device meshes of an FSDP2 policy.

Ranks count tensor-parallel ranks fastest, then context-parallel ones, then replicas of the batch,
as `Topology` does. FSDP shards over consecutive ranks, whatever they do with a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_policy.device import current_device
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Coords, Topology


@dataclass(frozen=True)
class FsdpGroups:
    """`batch` is how ranks share a batch. Ranks of `shards` hold the whole model between them;
    those of `copies` hold the same part of it.
    """

    batch: Groups
    shards: dist.ProcessGroup
    copies: dist.ProcessGroup
    mesh: DeviceMesh
    made: list[dist.ProcessGroup] = field(default_factory=list)

    def close(self) -> None:
        """Leave all groups."""
        for group in self.made:
            dist.destroy_process_group(group)
        self.made.clear()


def make_groups(topology: Topology, copies: int, timeout_s: float) -> FsdpGroups:
    """The groups of this rank among `topology.world_size`, of which `copies` hold each part of the
    model. No collective waits longer than `timeout_s` seconds.
    """
    made: list[dist.ProcessGroup] = []
    rank, world = dist.get_rank(), topology.world_size
    size = world // copies

    def mine(of: Sequence[Sequence[int]]) -> Any:
        """This rank's group among disjoint lists of ranks; every rank makes all of them."""
        own = None
        for ranks in of:
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            if rank in ranks:
                own = group
                made.append(group)
        assert own is not None
        return own

    def along(axis: str) -> list[list[int]]:
        lines: dict[Coords, list[int]] = {}
        for each in range(world):
            coords = vars(topology.coords(each)) | {axis: 0}
            lines.setdefault(Coords(**coords), []).append(each)
        return list(lines.values())

    alone = mine([[each] for each in range(world)])
    everyone = mine([range(world)])
    cp = alone if topology.cp == 1 else mine(along("cp"))
    dp = everyone if topology.cp == 1 else mine(along("dp"))
    kind = current_device().type
    if copies == 1:
        mesh = DeviceMesh.from_group(everyone, kind, mesh_dim_names=("shard",))
        shards, same = everyone, alone
    else:
        grid = [list(range(first, first + size)) for first in range(0, world, size)]
        shards = mine(grid)
        same = mine([[row[at] for row in grid] for at in range(size)])
        mesh = DeviceMesh.from_group(
            [same, shards], kind, mesh=grid, mesh_dim_names=("replicate", "shard")
        )
    batch = Groups(tp=alone, pp=alone, dp=dp, cp=cp, dp_cp=everyone)
    return FsdpGroups(batch, shards, same, mesh, made)
