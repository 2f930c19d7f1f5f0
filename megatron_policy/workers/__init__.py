"""The Ray layer: a driver, the actor of each rank, and the cluster that both run in. Read
`driver/policy.py` first, then `worker/actor.py` and `cluster/group.py`.
"""

from megatron_policy.extras import require

require("ray")

from megatron_policy.workers.cluster.environment import init_ray  # noqa: E402
from megatron_policy.workers.cluster.group import WorkerGroup  # noqa: E402
from megatron_policy.workers.cluster.virtual_cluster import RayVirtualCluster  # noqa: E402

__all__ = ["RayVirtualCluster", "WorkerGroup", "init_ray"]
