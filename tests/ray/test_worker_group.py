"""The worker group as it should be: ranks, environment, arguments, results, room, shutdown."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import ray

import megatron_policy
from megatron_policy.errors import ConfigError, WorkerError
from megatron_policy.parallel.topology import Topology
from megatron_policy.workers import RayVirtualCluster, WorkerGroup
from megatron_policy.workers.cluster.environment import make_python_path
from tests.ray.actors import GroupMaker, Worker, still_running


def test_eight_workers_run_on_two_cpus_in_pp_dp_cp_tp_order_and_get_the_shards_of_their_index(
    make_group: GroupMaker, diary: Path
) -> None:
    assert ray.cluster_resources()["CPU"] == 2
    topology = Topology(tp=2, dp=2, pp=2)
    group = make_group(topology, diary=str(diary))
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
    seats = group.run_all("env", names=names)
    assert [seat["RANK"] for seat in seats] == [str(rank) for rank in range(8)]
    assert [seat["LOCAL_RANK"] for seat in seats] == [str(rank) for rank in range(8)]
    assert {(seat["WORLD_SIZE"], seat["NODE_RANK"]) for seat in seats} == {("8", "0")}
    assert len({(seat["MASTER_ADDR"], seat["MASTER_PORT"]) for seat in seats}) == 1
    assert len(set(group.pids)) == 8
    received = group.run_all("echo", data=None)
    assert [rank for rank, _, _ in received] == list(range(8))
    refs = group.run_sharded("echo", data=["first half", "second half"], more=3)
    assert refs == [(0, "first half", 3), (2, "second half", 3)]

    # Arrays, because none of the eight has to import torch for them.
    shards = [np.arange(3), np.arange(3) + 10]
    assert [rank for rank, _, _ in group.run_sharded("echo", data=shards)] == [0, 2]
    for rank, shard in enumerate(group.run_all("recall")):
        assert np.array_equal(shard, shards[topology.coords(rank).dp])
    with pytest.raises(ConfigError, match="3 shards for 2 data-parallel ranks"):
        group.run_sharded("echo", data=[1, 2, 3])
    assert len(list(diary.iterdir())) == 8
    assert group.shutdown()


def test_config_env_vars_and_the_drivers_import_path_reach_the_workers(
    make_group: GroupMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    group = make_group(Topology(tp=2), env_vars={"A_FLAG": "on", "PYTHONPATH": "/somewhere"})
    for env in group.run_all("env", names=["A_FLAG", "PYTHONPATH", "OMP_NUM_THREADS"]):
        assert env["A_FLAG"] == "on"
        assert env["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))
        path = env["PYTHONPATH"].split(os.pathsep)
        assert path[0] == "/somewhere"
        package = Path(megatron_policy.__path__[0])
        assert str(package.parent) in path and str(package) not in path
    # What the interpreter brings is left out.
    assert not [
        p for p in make_python_path().split(os.pathsep) if Path(p).is_relative_to(sys.prefix)
    ]
    with pytest.raises(ConfigError, match=r"env_vars sets MASTER_PORT, RANK"):
        make_group(Topology(), env_vars={"RANK": "7", "MASTER_PORT": "1"})


def test_a_layout_of_another_size_than_the_cluster_is_refused() -> None:
    cluster = RayVirtualCluster([2], use_gpus=False)
    with pytest.raises(ConfigError, match=r"4 ranks .* 2 workers"):
        WorkerGroup(cluster, Worker, Topology(tp=4))
    cluster.shutdown()


def test_workers_per_node_takes_the_first_bundles_of_each_node() -> None:
    cluster = RayVirtualCluster([2, 3], use_gpus=False)
    assert cluster.world_size() == 5
    seats = [(slot.node, slot.bundle) for slot in cluster.slots([1, 2])]
    assert seats == [(0, 0), (1, 0), (1, 1)]
    with pytest.raises(ConfigError, match=r"workers_per_node=3 .*\[2, 3\]"):
        cluster.slots(3)
    cluster.shutdown()


def test_a_full_cluster_refuses_a_second_group_until_the_first_is_gone(diary: Path) -> None:
    cluster = RayVirtualCluster([1], use_gpus=False)
    kwargs = {"diary": str(diary)}
    first = WorkerGroup(cluster, Worker, Topology(), kwargs=kwargs, name="first")
    with pytest.raises(ConfigError, match="holds first-"):
        WorkerGroup(cluster, Worker, Topology(), kwargs=kwargs)
    assert first.shutdown()
    second = WorkerGroup(cluster, Worker, Topology(), kwargs=kwargs)
    assert second.run_all("echo", data=5) == [(0, 5, None)]
    assert second.shutdown()
    cluster.shutdown()


def test_each_worker_on_gpus_sees_one_and_colocated_groups_share_it_and_meet_at_other_ports(
    make_group: GroupMaker,
) -> None:
    cluster, names = RayVirtualCluster([2], max_colocated_worker_groups=2), ["CUDA_VISIBLE_DEVICES"]
    groups = [WorkerGroup(cluster, Worker, Topology(dp=2)) for _ in range(2)]
    ports = set()
    for group in groups:
        seats = group.run_all("env", names=[*names, "MASTER_PORT"])
        assert sorted(seat["CUDA_VISIBLE_DEVICES"] for seat in seats) == ["0", "1"]
        ports |= {seat["MASTER_PORT"] for seat in seats}
    assert len(ports) == 2
    assert all(group.shutdown() for group in groups)
    cluster.shutdown()
    on_cpus = make_group(Topology()).run_all("env", names=names)
    assert on_cpus == [{"CUDA_VISIBLE_DEVICES": ""}]


def test_more_than_ray_has_is_refused_with_both_amounts() -> None:
    cluster = RayVirtualCluster([999], num_gpus_per_node=999)
    with pytest.raises(ConfigError, match=r"999 bundles of 1 GPU.*Ray has \d+ GPU, 2 CPU"):
        cluster.get_placement_groups()


def test_room_that_is_taken_is_waited_for_and_then_reported() -> None:
    everything = RayVirtualCluster([200], use_gpus=False)
    everything.get_placement_groups()
    late = RayVirtualCluster([1], use_gpus=False, timeout_s=0.5)
    with pytest.raises(WorkerError, match=r"1 bundles of 0.01 CPU.*free now: 2 GPU, 0 CPU"):
        late.get_placement_groups()
    assert everything.shutdown()
    assert everything.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bundle_ct_per_node_list": []}, "one number of workers >= 1 per node"),
        ({"bundle_ct_per_node_list": [2, 0]}, "one number of workers >= 1 per node"),
        ({"bundle_ct_per_node_list": [9]}, "at most 8 fit on a node"),
        ({"bundle_ct_per_node_list": [1], "max_colocated_worker_groups": 0}, "must be 1 or more"),
        ({"bundle_ct_per_node_list": [1], "placement_group_strategy": "PCK"}, "STRICT_PACK, PACK"),
    ],
)
def test_an_impossible_cluster_is_refused_when_it_is_described(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RayVirtualCluster(**arguments)


def test_shutdown_may_be_repeated_and_ends_every_process(
    make_group: GroupMaker, diary: Path
) -> None:
    group = make_group(Topology(dp=2), diary=str(diary))
    assert len(list(diary.iterdir())) == 2
    assert group.shutdown()
    assert not still_running(diary, within_s=0)
    assert group.shutdown()
    with pytest.raises(WorkerError, match="has been shut down"):
        group.run_all("echo", data=1)


def test_a_forgotten_group_takes_its_processes_along(diary: Path) -> None:
    cluster = RayVirtualCluster([2], use_gpus=False)
    group = WorkerGroup(cluster, Worker, Topology(tp=2), kwargs={"diary": str(diary)})
    group.submit_all("act", how={}, others="sleep")
    del group
    gc.collect()
    assert not still_running(diary)
    cluster.shutdown()
