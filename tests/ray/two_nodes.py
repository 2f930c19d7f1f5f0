"""A Ray of two nodes on this machine, in a process of its own: a worker of the other node stops,
then all of that node. Run by test_stopped_workers; ends with an error if a call is not ended as it
should be.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from megatron_policy.errors import WorkerError
from megatron_policy.parallel.topology import Topology
from megatron_policy.workers import RayVirtualCluster, WorkerGroup, init_ray
from tests.ray.actors import Worker, promptly

LIMIT_S = 4.0
ROOM = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=ROOM)
    far = cluster.add_node(**ROOM)
    held: list[psutil.Process] = []
    try:
        init_ray(cluster.address)
        room = RayVirtualCluster([2], use_gpus=False, placement_group_strategy="STRICT_SPREAD")
        long_work_goes_on_and_a_stopped_worker_is_named(room)
        held = a_node_out_of_reach_is_named(room)
    finally:
        for process in held:
            process.kill()
        cluster.remove_node(far, allow_graceful=False)
        ray.shutdown()
        cluster.shutdown()


def started(room: RayVirtualCluster) -> WorkerGroup:
    group = WorkerGroup(room, Worker, Topology(dp=2), timeout_s=LIMIT_S)
    assert [place.node == here() for place in group._places].count(True) == 1
    return group


def here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def the_far_rank(group: WorkerGroup) -> int:
    return next(rank for rank, place in enumerate(group._places) if place.node != here())


def long_work_goes_on_and_a_stopped_worker_is_named(room: RayVirtualCluster) -> None:
    group = started(room)
    rank = the_far_rank(group)
    fine = ["rank 0 is fine", "rank 1 is fine"]
    assert group.run_all("act", how={rank: "hold"}) == fine
    worker = psutil.Process(group.pids[rank])
    with promptly(), pytest.raises(WorkerError, match=f"rank {rank} has stopped"):
        group.run_all("act", how={rank: "stop"})
    assert group.shutdown()
    worker.wait(timeout=600)


def a_node_out_of_reach_is_named(room: RayVirtualCluster) -> list[psutil.Process]:
    group = started(room)
    rank = the_far_rank(group)
    assert group.run_all("act", how={}, others="nap")  # long enough to look at the other node
    worker = psutil.Process(group.pids[rank])
    raylet = worker.parent()
    assert raylet is not None and "raylet" in raylet.name()
    stopped = [raylet, *raylet.children(recursive=True)]
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    with promptly(), pytest.raises(WorkerError, match=f"rank {rank} cannot be reached") as caught:
        group.run_all("act", how={})
    assert caught.value.rank == rank
    group.shutdown()
    return stopped


if __name__ == "__main__":
    main()
