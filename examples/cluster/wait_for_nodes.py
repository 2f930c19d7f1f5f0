"""`python wait_for_nodes.py ADDRESS NUMBER`: waits until a Ray has that many nodes.

A `RayVirtualCluster` refuses at once what Ray does not have yet, so a driver starts afterwards.
"""

from __future__ import annotations

import sys
import time

import ray

TIMEOUT_S, INTERVAL_S = 600.0, 1.0


def joined(address: str) -> int:
    """The nodes of that Ray, 0 while nobody answers there."""
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)
    except ConnectionError:
        return 0
    return sum(node["Alive"] for node in ray.nodes())


def main() -> None:
    """Wait; after `TIMEOUT_S` seconds, exit with a message."""
    address, wanted = sys.argv[1], int(sys.argv[2])
    deadline = time.monotonic() + TIMEOUT_S
    while (found := joined(address)) < wanted:
        if time.monotonic() > deadline:
            sys.exit(
                f"{found} of {wanted} nodes have joined the Ray at {address} in {TIMEOUT_S:g} s: "
                "look at what `ray start` says on the others, and whether they reach this address"
            )
        time.sleep(INTERVAL_S)
    print(f"{found} nodes have joined the Ray at {address}", flush=True)


if __name__ == "__main__":
    main()
