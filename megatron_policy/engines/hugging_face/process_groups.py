"""The process groups and device meshes of an FSDP2 policy.

Ranks count tensor-parallel ranks fastest, then context-parallel ones, then replicas of the batch,
as `Topology` does. FSDP shards what a tensor-parallel rank has over the ranks with the same number,
whatever they do with a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_policy.device import current_device
from megatron_policy.device.process_groups import new_group
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Topology


@dataclass(frozen=True)
class FsdpGroups:
    """`batch` is how ranks share a batch. Ranks of `shards` hold the whole model between them,
    those of `fsdp` what a tensor-parallel rank has of it; those of `copies` hold the same part.
    """

    batch: Groups
    shards: dist.ProcessGroup
    fsdp: dist.ProcessGroup
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
    made: list[Any] = []
    rank, world = dist.get_rank(), topology.world_size
    size = world // copies

    def group_of(groups: Sequence[Sequence[int]]) -> Any:
        """The one of these groups that this rank is in.

        All ranks make all of them, in one order, so that torch numbers them alike. The names of
        groups that only members make come back with a second policy, and with them the addresses
        that the first one left in the store.
        """
        for ranks in groups:
            group = new_group(ranks, timeout_s)
            if rank in ranks:
                made.append(group)
        return made[-1]

    def along(*axes: str) -> list[list[int]]:
        lines: dict[Any, list[int]] = {}
        for each in range(world):
            others = vars(topology.coords(each)) | dict.fromkeys(axes)
            lines.setdefault(tuple(others.items()), []).append(each)
        return list(lines.values())

    alone, everyone = group_of([[each] for each in range(world)]), group_of([range(world)])
    cp = alone if topology.cp == 1 else group_of(along("cp"))
    tp = alone if topology.tp == 1 else group_of(along("tp"))
    dp_cp = everyone if topology.tp == 1 else group_of(along("dp", "cp"))
    dp = dp_cp if topology.cp == 1 else group_of(along("dp"))
    kind = current_device().type
    if copies == 1:
        shards, same, fsdp = everyone, alone, dp_cp
        mesh = DeviceMesh.from_group(fsdp, kind, mesh_dim_names=("shard",))
    else:
        starts = range(0, world, size)
        shards = group_of([range(first, first + size) for first in starts])
        same = group_of([range(first, world, size) for first in range(size)])
        # Of each tensor-parallel rank, what each copy shards.
        grids = [
            [list(range(first + at, first + size, topology.tp)) for first in starts]
            for at in range(topology.tp)
        ]
        fsdp = shards if topology.tp == 1 else group_of([line for grid in grids for line in grid])
        mesh = DeviceMesh.from_group(
            [same, fsdp],
            kind,
            mesh=grids[rank % topology.tp],
            mesh_dim_names=("replicate", "shard"),
        )
    batch = Groups(tp=tp, pp=alone, dp=dp, cp=cp, dp_cp=dp_cp)
    return FsdpGroups(batch, shards, fsdp, same, mesh, made)
