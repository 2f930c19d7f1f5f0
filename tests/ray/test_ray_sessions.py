"""Drivers of their own, in processes of their own: without Ray, and attached to one that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_RAY = """
import ray
from megatron_policy.errors import WorkerError
from megatron_policy.workers import RayVirtualCluster
cluster = RayVirtualCluster([1], use_gpus=False)
try:
    cluster.get_placement_groups()
except WorkerError as error:
    print(error, ray.is_initialized(), cluster.shutdown())
"""

JOINED = """
import sys
sys.path.insert(0, sys.argv[1])
import ray
from megatron_policy import RayVirtualCluster, init_ray
from megatron_policy.parallel.topology import Topology
from megatron_policy.workers import WorkerGroup
from tests.ray.actors import Worker
init_ray()
init_ray()
cluster = RayVirtualCluster([1], use_gpus=False)
group = WorkerGroup(cluster, Worker, Topology(), kwargs={"diary": sys.argv[2]})
"""
ATTACHED = (
    JOINED
    + """
print(group.run_all("act", how={}), group.shutdown(), ray.cluster_resources()["GPU"])
"""
)
LEFT_BEHIND = (
    JOINED
    + """
group.submit_all("act", how={}, others="sleep")
"""
)


def drive(code: str, *arguments: str, cwd: Path = ROOT, **env: str) -> str:
    """What a driver that runs `code` prints."""
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        timeout=600,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def address() -> str:
    return ray.get_runtime_context().gcs_address


def test_a_driver_without_ray_is_told_to_start_it() -> None:
    said = drive(WITHOUT_RAY)
    assert "init_ray()" in said
    assert said.endswith("False True"), "Ray must not start by itself"


@pytest.mark.nightly
def test_init_ray_attaches_and_workers_import_what_the_driver_imports(tmp_path: Path) -> None:
    said = drive(ATTACHED, str(ROOT), str(tmp_path), cwd=tmp_path, RAY_ADDRESS=address())
    assert said == "['rank 0 is fine'] True 2.0"


@pytest.mark.nightly
def test_a_driver_that_ends_without_shutdown_leaves_no_worker(tmp_path: Path) -> None:
    from tests.ray.actors import still_running

    drive(LEFT_BEHIND, str(ROOT), str(tmp_path), RAY_ADDRESS=address())
    assert len(list(tmp_path.iterdir())) == 1
    assert not still_running(tmp_path)
