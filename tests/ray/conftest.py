"""Worker groups that are gone when their test is over. Files of this folder skip without Ray, and
this one, which is imported even then, imports Ray in its fixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron_policy.parallel.topology import Topology

if TYPE_CHECKING:
    from megatron_policy import Policy
    from megatron_policy.workers import RayVirtualCluster, WorkerGroup
    from tests.ray.actors import GroupMaker
    from tests.ray.policies import PolicyMaker


@pytest.fixture(scope="session", autouse=True)
def in_ray(ray_instance: None) -> None:
    """Every test here needs it."""


@pytest.fixture
def make_group() -> Iterator[GroupMaker]:
    """`make_group(topology, **constructor arguments)` -> a group of PlainWorkers on CPUs, which may
    be stopped for `timeout_s`.
    """
    from megatron_policy.workers import RayVirtualCluster, WorkerGroup
    from tests.ray.actors import Worker

    clusters: list[RayVirtualCluster] = []
    groups: list[WorkerGroup] = []

    def make(
        topology: Topology,
        env_vars: dict[str, str] | None = None,
        timeout_s: float = 20.0,
        **kwargs: Any,
    ) -> WorkerGroup:
        cluster = RayVirtualCluster([topology.world_size], use_gpus=False)
        clusters.append(cluster)
        group = WorkerGroup(
            cluster, Worker, topology, kwargs=kwargs, env_vars=env_vars, timeout_s=timeout_s
        )
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.kill()
    for cluster in clusters:
        cluster.shutdown()


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Path]:
    """A folder in which workers leave their process ids; all of them must be gone at the end."""
    from tests.ray.actors import still_running

    yield tmp_path
    assert not still_running(tmp_path)


@pytest.fixture
def make_policy(checkpoint: Callable[..., Path]) -> Iterator[PolicyMaker]:
    """`make_policy(layout)` -> a Policy with two CPU workers, which is gone after the test."""
    # Here, because it brings Megatron-Core, which the worker group's own tests do without.
    from megatron_policy import Policy
    from megatron_policy.workers import RayVirtualCluster
    from tests.ray.policies import TOKENIZER, config_of

    open_: list[Any] = []

    def make(layout: dict[str, Any], path: Path | None = None, **top: Any) -> Policy:
        cluster = RayVirtualCluster([2], use_gpus=False)
        open_.append(cluster)
        policy = Policy(cluster, config_of(checkpoint, layout, path) | top, TOKENIZER)
        open_.append(policy)
        return policy

    yield make
    for each in reversed(open_):
        each.shutdown()
