"""Room for workers without GPUs."""

from __future__ import annotations

import socket

import ray
from ray.util.placement_group import placement_group, remove_placement_group

CPU = 0.01


class RayVirtualCluster:
    """One placement group, a bundle for each worker."""

    def __init__(self, bundle_ct_per_node_list: list[int], use_gpus: bool = True) -> None:
        assert not use_gpus, "the stand-in has none"
        self._size = sum(bundle_ct_per_node_list)
        self.group = placement_group([{"CPU": CPU}] * self._size)
        ray.get(self.group.ready(), timeout=60)

    def world_size(self) -> int:
        return self._size

    def get_master_address_and_port(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1", probe.getsockname()[1]

    def shutdown(self) -> None:
        remove_placement_group(self.group)
