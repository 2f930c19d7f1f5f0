"""The Ray layer: cluster, worker group, actor and driver. Read `policy.py` (the driver) first, then
`worker.py` (the actor) and `group.py`.
"""

from megatron_policy.workers.cluster import RayVirtualCluster
from megatron_policy.workers.environment import init_ray
from megatron_policy.workers.group import WorkerGroup

__all__ = ["RayVirtualCluster", "WorkerGroup", "init_ray"]
