"""Starts workers from the name of their class, and calls them."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env
from nemo_rl.distributed.virtual_cluster import CPU, RayVirtualCluster

TIMEOUT_S = 240.0


def with_defaults(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The given options and, on every level, what a class was declared with besides."""
    found = dict(defaults)
    for name, value in given.items():
        below = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = with_defaults(value, found[name]) if below else value
    return found


class RayWorkerBuilder:
    """What a worker is made of; the class itself is imported elsewhere."""

    @ray.remote(num_cpus=0)
    class IsolatedWorkerInitializer:
        """An actor that imports a worker's module in the Python of the worker, and makes it."""

        def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
            self.name, self.args, self.kwargs = ray_actor_class_fqn, args, kwargs

        def create_worker(self, **options: Any) -> ray.actor.ActorHandle:
            module, _, name = self.name.rpartition(".")
            worker_class = getattr(importlib.import_module(module), name)
            own = with_defaults(options, worker_class._default_options)
            return worker_class.options(**own).remote(*self.args, **self.kwargs)

        def imported(self) -> list[str]:
            """What its process has imported."""
            return sorted({name.partition(".")[0] for name in sys.modules})

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn, self.args, self.kwargs = ray_actor_class_fqn, args, kwargs

    def initializer(self, runtime_env: dict[str, Any]) -> ray.actor.ActorHandle:
        make = self.IsolatedWorkerInitializer.options(runtime_env=runtime_env)
        return make.remote(self.ray_actor_class_fqn, *self.args, **self.kwargs)


class RayWorkerGroup:
    """One worker per bundle. Nothing waits for their constructors: a call is the first to fail.

    `one_initializer`: one process imports the worker's module for all, with little environment, and
    not one for each of them with the worker's.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        builder: RayWorkerBuilder,
        sharding: NamedSharding,
        env_vars: dict[str, str],
        one_initializer: bool,
    ) -> None:
        self.sharding, size = sharding, cluster.world_size()
        python = get_actor_python_env(builder.ray_actor_class_fqn)
        assert not python.startswith("uv"), f"the stand-in makes no environments: {python}"
        address, port = cluster.get_master_address_and_port()
        common = {**os.environ, **env_vars, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        common.pop("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", None)
        path = {key: common[key] for key in ("PYTHONPATH",) if key in common}
        self.initializers, made = [], []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            runtime_env = {"py_executable": python, "env_vars": common | own | {"NODE_RANK": "0"}}
            if not (one_initializer and self.initializers):
                few = {"py_executable": python, "env_vars": path}
                self.initializers.append(
                    builder.initializer(few if one_initializer else runtime_env)
                )
            place = PlacementGroupSchedulingStrategy(cluster.group, rank)
            options = {"num_cpus": CPU, "num_gpus": 0, "scheduling_strategy": place}
            make = self.initializers[-1].create_worker
            made.append(make.remote(runtime_env=runtime_env, **options))
        self.workers = ray.get(made, timeout=TIMEOUT_S)

    def call_all(self, method: str, **kwargs: Any) -> list[Any]:
        """Every worker's answer."""
        stored = {name: ray.put(given) for name, given in kwargs.items()}
        calls = [getattr(each, method).remote(**stored) for each in self.workers]
        return ray.get(calls, timeout=TIMEOUT_S)

    def call_sharded(self, method: str, data: list[Any], **common: Any) -> list[Any]:
        """The answer of each data-parallel index, from the rank that is first in all else."""
        shards = [ray.put(shard) for shard in data]
        common = {key: ray.put(value) for key, value in common.items()}
        calls, wanted = [], []
        for rank, worker in enumerate(self.workers):
            coords = self.sharding.get_worker_coords(rank)
            index = coords.pop("data_parallel")
            calls.append(getattr(worker, method).remote(data=shards[index], **common))
            if not any(coords.values()):
                wanted.append(calls[-1])
        ray.get(calls, timeout=TIMEOUT_S)
        return ray.get(wanted)

    def shutdown(self, kill: bool) -> None:
        """Ask workers to leave; some releases of the host end them then, others let go of them."""
        self.call_all("shutdown")
        for worker in self.workers if kill else ():
            ray.kill(worker)
        self.workers, self.initializers = [], []
