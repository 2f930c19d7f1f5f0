"""The Ray edge: cluster, worker group, actor and driver; the only package that imports ray."""

from megatron_policy.workers.cluster import RayVirtualCluster
from megatron_policy.workers.environment import init_ray
from megatron_policy.workers.group import WorkerGroup

__all__ = ["RayVirtualCluster", "WorkerGroup", "init_ray"]
