"""The host itself, where it is installed: every test of NeMo RL in this folder skips with a reason
where it is not. The folder of verl says so itself.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def host_is_there() -> bool:
    """Whether `import nemo_rl` finds the host's own tree, not another package of that name."""
    spec = importlib.util.find_spec("nemo_rl")
    return bool(spec and spec.origin) and (Path(spec.origin).parent / "algorithms").is_dir()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if host_is_there():
        return
    here = Path(__file__).parent
    for item in items:
        if here == Path(item.path).parent:
            item.add_marker(pytest.mark.skip(reason="NeMo RL (nemo_rl) is not installed"))


@pytest.fixture(scope="session")
def host_ray() -> Iterator[None]:
    """A Ray instance with room for the host's helper actors, which take a whole CPU each."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=32,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.fixture
def host_policy(host_ray: None) -> Iterator[Callable[..., Any]]:
    """`host_policy(config, world_size, **keywords)` -> the host's own Policy on CPU workers of
    ours, gone after the test.
    """
    from tests.hosts.real.host import make_policy

    open_: list[tuple[Any, Any]] = []

    def make(config: dict[str, Any], world_size: int, **keywords: Any) -> Any:
        close()
        open_.append(make_policy(config, world_size, **keywords))
        return open_[-1][0]

    def close() -> None:
        while open_:
            policy, cluster = open_.pop()
            policy.shutdown()
            # Older hosts leave the workers to the garbage collector.
            import ray

            for worker in policy.worker_group.workers:
                ray.kill(worker)
            cluster.shutdown()

    yield make
    close()
