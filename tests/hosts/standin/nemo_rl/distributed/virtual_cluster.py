"""Room for workers without GPUs."""

from __future__ import annotations

import random
import socket

import ray
from ray.util.placement_group import placement_group, remove_placement_group

CPU = 0.01
# Below those that the kernel hands out to outgoing connections, and none that Ray's workers have.
PORTS = range(30000, 32000)


class RayVirtualCluster:
    """One placement group, a bundle for each worker."""

    def __init__(self, bundle_ct_per_node_list: list[int], use_gpus: bool = True) -> None:
        assert not use_gpus, "the stand-in has none"
        self._held: list[socket.socket] = []
        self._size = sum(bundle_ct_per_node_list)
        self.group = placement_group([{"CPU": CPU}] * self._size)
        ray.get(self.group.ready(), timeout=600)

    def world_size(self) -> int:
        return self._size

    def get_master_address_and_port(self) -> tuple[str, int]:
        port = next(port for port in random.sample(PORTS, len(PORTS)) if self._hold(port))
        return "127.0.0.1", port

    def shutdown(self) -> None:
        for held in self._held:
            held.close()
        remove_placement_group(self.group)

    def _hold(self, port: int) -> bool:
        """Keep others from the port until rank 0 listens there, which this does not prevent."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            return False
        self._held.append(held)
        return True
