"""The Ray layer: a driver, the actor of each rank, and the cluster that both run in. Read
`policy.py` first, then `worker.py` and `cluster/group.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_policy.workers.cluster.environment import init_ray
    from megatron_policy.workers.cluster.group import WorkerGroup
    from megatron_policy.workers.cluster.virtual_cluster import RayVirtualCluster

__all__ = ["RayVirtualCluster", "WorkerGroup", "init_ray"]

# The module from which a name is imported on first use: these need Ray.
_HOME = {
    "RayVirtualCluster": "cluster.virtual_cluster",
    "WorkerGroup": "cluster.group",
    "init_ray": "cluster.environment",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
