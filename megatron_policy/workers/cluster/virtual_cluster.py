"""Reserves resources for worker processes in a Ray cluster, checks them against what Ray has, and
finds a free port.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_policy.coordination.rendezvous import PORTS
from megatron_policy.coordination.timeouts import checked_timeout
from megatron_policy.errors import ConfigError, WorkerError
from megatron_policy.workers.cluster.environment import make_python_path

STRATEGIES = ("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD")


@dataclass(frozen=True)
class Slot:
    """One worker's bundle; `node` is an index into `bundle_ct_per_node_list`."""

    group: PlacementGroup
    bundle: int
    node: int

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Ray's scheduling option that puts a task or an actor here."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundle,
            placement_group_capture_child_tasks=True,
        )


class RayVirtualCluster:
    """Resources in a Ray cluster: one bundle per worker, in one placement group per node.

    Args:
        bundle_ct_per_node_list: number of workers per node.
        use_gpus: one GPU per bundle; otherwise workers share CPUs and any number of them fits.
        max_colocated_worker_groups: how many worker groups may share the same bundles at a time.
        num_gpus_per_node: the most bundles an entry may have with `use_gpus`.
        name: prefix of the placement groups' names, for Ray's own displays.
        placement_group_strategy: Ray strategy for the bundles of one entry. STRICT_PACK: an entry
            is one machine.
        timeout_s: seconds to wait for resources that others hold.

    Nothing is reserved before the first use. By then Ray must be running (see `init_ray`), and an
    autoscaling cluster must have its full size: resources that it does not have are refused at
    once.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "STRICT_PACK",
        *,
        timeout_s: float = 180.0,
    ) -> None:
        self._counts = tuple(bundle_ct_per_node_list)
        self._groups: list[PlacementGroup] | None = None
        self._tenants: list[str] = []
        self._ports: set[int] = set()
        check_request(self._counts, use_gpus, num_gpus_per_node, max_colocated_worker_groups)
        if placement_group_strategy not in STRATEGIES:
            raise ConfigError(
                f"placement_group_strategy is {placement_group_strategy!r}; "
                f"Ray supports {', '.join(STRATEGIES)}"
            )
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        self._strategy = placement_group_strategy
        self._timeout_s = checked_timeout(timeout_s)

    def world_size(self) -> int:
        """Number of bundles: the number of workers of a group that uses all of them."""
        return sum(self._counts)

    @property
    def gpus_per_worker(self) -> float:
        """The part of a GPU that each worker may ask Ray for."""
        return 1 / self.max_colocated_worker_groups if self.use_gpus else 0

    @property
    def cpus_per_worker(self) -> float:
        """The part of a CPU that each worker may ask Ray for."""
        return CPU_SHARE

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups, reserved on first use.

        ConfigError if Ray has too few resources, WorkerError if others hold them for `timeout_s`.
        """
        if self._groups is not None:
            return self._groups
        packed = self._strategy == "STRICT_PACK"
        refuse_what_ray_lacks(self._counts, self.use_gpus, packed)
        bundle = {"CPU": self.cpus_per_worker * self.max_colocated_worker_groups}
        if self.use_gpus:
            bundle["GPU"] = 1.0
        groups = [
            placement_group(
                [dict(bundle)] * count,
                strategy=self._strategy,
                name=f"{self.name}-node{node}" if self.name else "",
            )
            for node, count in enumerate(self._counts)
        ]
        deadline = time.monotonic() + self._timeout_s
        for group in groups:
            if not group.wait(max(0.0, deadline - time.monotonic())):
                for each in groups:
                    remove_placement_group(each)
                raise WorkerError(
                    f"no room for the worker group after {self._timeout_s:g} s: it asks for "
                    f"{describe_request(self._counts, self.use_gpus)}; free now: "
                    f"{describe_amounts(ray.available_resources())}. Another cluster or task holds "
                    "the rest: shut it down, or ask for less"
                )
        self._groups = groups
        return groups

    def size_of(self, workers_per_node: int | Sequence[int] | None = None) -> int:
        """Number of workers of a group with that many workers per node (None: one per bundle)."""
        return sum(self._wanted(workers_per_node))

    def slots(self, workers_per_node: int | Sequence[int] | None = None) -> list[Slot]:
        """Rank r's slot at index r: node by node, the first `workers_per_node` bundles of each."""
        wanted = self._wanted(workers_per_node)
        return [
            Slot(group, bundle, node)
            for node, group in enumerate(self.get_placement_groups())
            for bundle in range(wanted[node])
        ]

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Address of rank 0's node and a free port there; every call returns another port."""
        slot = self.slots()[0]
        node = placement_group_table(slot.group)["bundles_to_node_id"][slot.bundle]
        if node == ray.get_runtime_context().get_node_id():
            address, port = address_and_port(self._ports)
        else:
            task = ray.remote(address_and_port).options(
                num_cpus=0,
                scheduling_strategy=slot.strategy(),
                runtime_env={"env_vars": {"PYTHONPATH": make_python_path()}},
            )
            address, port = ray.get(task.remote(self._ports), timeout=self._timeout_s)
        self._ports.add(port)
        return address, port

    def claim(self, tenant: str) -> None:
        """Register a worker group; ConfigError, instead of an endless wait, if there is no room."""
        if len(self._tenants) >= self.max_colocated_worker_groups:
            raise ConfigError(
                f"this cluster has room for {self.max_colocated_worker_groups} worker group(s) and "
                f"holds {', '.join(self._tenants)}. Shut one down first, or make the cluster with "
                "a larger max_colocated_worker_groups"
            )
        self._tenants.append(tenant)

    def release(self, tenant: str) -> None:
        """Unregister a worker group."""
        if tenant in self._tenants:
            self._tenants.remove(tenant)

    def shutdown(self) -> bool:
        """Release all resources, ending what still runs on them. Can be called again; the cluster
        can be reused.
        """
        groups, self._groups, self._tenants = self._groups, None, []
        if ray.is_initialized():
            for group in groups or []:
                remove_placement_group(group)
        return True

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_groups", None):
            self.shutdown()

    def _wanted(self, workers_per_node: int | Sequence[int] | None) -> list[int]:
        if workers_per_node is None:
            return list(self._counts)
        if isinstance(workers_per_node, int):
            wanted = [workers_per_node] * len(self._counts)
        else:
            wanted = list(workers_per_node)
        if len(wanted) != len(self._counts) or not all(
            1 <= count <= most for count, most in zip(wanted, self._counts, strict=True)
        ):
            raise ConfigError(
                f"workers_per_node={workers_per_node} does not fit the cluster's bundles "
                f"{list(self._counts)}: give at least 1 and at most that many per node"
            )
        return wanted


# CPUs only place a worker: with bundles of whole CPUs, more ranks than cores would wait forever,
# and the user's own tasks with them.
CPU_SHARE = 0.01


def describe_request(counts: Sequence[int], use_gpus: bool) -> str:
    """The requested resources, in words."""
    each = "1 GPU" if use_gpus else f"{CPU_SHARE} CPU"
    return f"{sum(counts)} bundles of {each} ({list(counts)} per node)"


def refuse_what_ray_lacks(counts: Sequence[int], use_gpus: bool, one_machine: bool) -> None:
    """ConfigError with both amounts unless Ray's nodes, when idle, can hold these bundles."""
    if not ray.is_initialized():
        raise WorkerError(
            "Ray is not running in this process: call megatron_policy.init_ray() "
            "(or ray.init) first"
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kind, each = ("GPU", 1.0) if use_gpus else ("CPU", CPU_SHARE)
    fit = [int(node.get(kind, 0) / each) for node in nodes]
    if sum(counts) > sum(fit) or (one_machine and max(counts) > max(fit)):
        raise ConfigError(
            f"the cluster asks for {describe_request(counts, use_gpus)}, but Ray has "
            f"{'; '.join(map(describe_amounts, nodes))}. Ask for at most {max(fit)} bundles on a "
            f"node and {sum(fit)} in all" + (", or pass use_gpus=False" if use_gpus else "")
        )


def check_request(counts: tuple[int, ...], use_gpus: bool, per_node: int, colocated: int) -> None:
    """ConfigError unless these are valid parameters of a cluster."""
    if not counts or not all(isinstance(count, int) and count >= 1 for count in counts):
        raise ConfigError(
            f"bundle_ct_per_node_list is {list(counts)}; "
            "give one number of workers >= 1 per node, for example [2]"
        )
    if use_gpus and max(counts) > per_node:
        raise ConfigError(
            f"bundle_ct_per_node_list is {list(counts)} with num_gpus_per_node={per_node}: "
            f"a bundle takes one GPU, so at most {per_node} fit on a node"
        )
    if colocated < 1:
        raise ConfigError(f"max_colocated_worker_groups is {colocated}; it must be 1 or more")


def describe_amounts(resources: dict[str, float]) -> str:
    """GPUs and CPUs among Ray's resources, in words."""
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("GPU", "CPU"))


def address_and_port(taken: set[int]) -> tuple[str, int]:
    """This node's address in the Ray cluster and a port of `PORTS` that is free now."""
    for port in random.sample(PORTS, len(PORTS)):
        if port in taken:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:  # in use: try the next
                continue
        return ray.util.get_node_ip_address(), port
    raise WorkerError(f"no free port between {PORTS.start} and {PORTS.stop - 1} on this node")
