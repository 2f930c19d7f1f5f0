"""A Ray of two nodes on this machine, in a process of its own: a policy trains over both until the
other node dies; a worker of another node stops, then all of that node. Run by test_stopped_workers
with the path of a tiny checkpoint; ends with an error if a result is not that of one process, or if
a call is not ended as it should be.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from examples.cluster.wait_for_nodes import joined
from megatron_policy import Policy
from megatron_policy.errors import WorkerError
from megatron_policy.parallel.topology import Topology
from megatron_policy.workers import RayVirtualCluster, WorkerGroup, init_ray
from tests.dist.cases import policy_config
from tests.ray.actors import Worker, promptly
from tests.ray.losses import Troubled
from tests.ray.policies import DP2, GBS, TOKENIZER, batch
from tests.ray.test_ray_training import Oracle

LIMIT_S = 4.0
ROOM = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


def main() -> None:
    head = ROOM | {"include_dashboard": False, "_system_config": {"health_check_period_ms": 500}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    far = cluster.add_node(**ROOM)
    held: list[psutil.Process] = []
    try:
        init_ray(cluster.address)
        assert joined(cluster.address) == 2
        a_policy_trains_over_both_and_names_the_rank_whose_node_dies(Path(sys.argv[1]))
        cluster.remove_node(far, allow_graceful=False)
        far = cluster.add_node(**ROOM)
        assert joined(cluster.address) == 2
        room = RayVirtualCluster([2], use_gpus=False, placement_group_strategy="STRICT_SPREAD")
        long_work_goes_on_and_a_stopped_worker_is_named(room)
        held = a_node_out_of_reach_is_named(room)
    finally:
        for process in held:
            process.kill()
        cluster.remove_node(far, allow_graceful=False)
        ray.shutdown()
        cluster.shutdown()


def a_policy_trains_over_both_and_names_the_rank_whose_node_dies(path: Path) -> None:
    room = RayVirtualCluster([1, 1], use_gpus=False)
    policy = Policy(room, policy_config(path, DP2, train_global_batch_size=GBS), TOKENIZER)
    group = policy.worker_group
    assert [place.node == here() for place in group._locations].count(True) == 1
    Oracle(path).check_step(policy)
    rank = the_far_rank(group)
    worker = psutil.Process(group.pids[rank])
    raylet = raylet_of(worker)
    with TemporaryDirectory() as marks:

        def kill_the_node_in_the_step() -> None:
            while not (Path(marks) / f"{rank}-{worker.pid}").exists():
                time.sleep(0.02)
            raylet.kill()

        killer = threading.Thread(target=kill_the_node_in_the_step)
        killer.start()
        with promptly(), pytest.raises(WorkerError, match=f"rank {rank} died") as caught:
            policy.train(batch(), Troubled(Path(marks)))
        killer.join()
    assert caught.value.rank == rank
    with promptly(), pytest.raises(WorkerError, match="is broken"):
        policy.get_logprobs(batch())
    with promptly():
        policy.shutdown()
    room.shutdown()
    # Ray would end it after its step, for which nobody waits any more.
    worker.kill()


def started(room: RayVirtualCluster) -> WorkerGroup:
    group = WorkerGroup(room, Worker, Topology(dp=2), timeout_s=LIMIT_S)
    assert [place.node == here() for place in group._locations].count(True) == 1
    return group


def here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def the_far_rank(group: WorkerGroup) -> int:
    return next(rank for rank, place in enumerate(group._locations) if place.node != here())


def raylet_of(worker: psutil.Process) -> psutil.Process:
    """The node that has started it."""
    raylet = worker.parent()
    assert raylet is not None and "raylet" in raylet.name()
    return raylet


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
    raylet = raylet_of(worker)
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
