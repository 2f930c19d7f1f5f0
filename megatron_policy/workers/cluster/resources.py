"""Checks what a cluster requests against what Ray has, and finds a free port."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

import ray

from megatron_policy.coordination.rendezvous import PORTS
from megatron_policy.errors import ConfigError, WorkerError

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
