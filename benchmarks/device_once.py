"""What this process's device does at best: `python -m benchmarks.device_once SIZE BYTES TURNS`.

Prints its name and memory, how many such devices are visible, and the rates of bf16 matrix products
of SIZE x SIZE and of copies of BYTES, on the device and from the host.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_policy import device
from megatron_policy.device.profiling import device_name
from megatron_policy.device.timing import Stopwatch

WARM_UP = 2
"""Untimed turns before the first timed one."""

Seconds = dict[str, list[float]]


def alternate(programs: Mapping[str, Callable[[], Any]], turns: int) -> Seconds:
    """The seconds of each program in every turn, on the device's clock; the programs take turns.

    Each starts on an idle device.
    """
    seconds: Seconds = {name: [] for name in programs}
    for turn in range(-WARM_UP, turns):
        for name, program in programs.items():
            spent = timed(program)
            if turn >= 0:
                seconds[name].append(spent)
    return seconds


def timed(program: Callable[[], Any]) -> float:
    """Seconds on the device's clock until all that `program` queued is done."""
    stopwatch = Stopwatch()
    device.synchronize()
    with stopwatch.timing("all"):
        program()
    device.synchronize()
    return stopwatch.seconds("all")


def main(size: int, nbytes: int, turns: int) -> dict[str, Any]:
    """Measure the device."""
    where = device.place_process()
    left = torch.empty(size, size, dtype=torch.bfloat16, device=where).normal_()
    right = torch.empty_like(left).normal_()
    product = torch.empty_like(left)
    source = torch.empty(nbytes, dtype=torch.uint8, device=where).fill_(1)
    target, pageable = torch.empty_like(source), torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    pinned = device.host_buffer(source).fill_(1)
    seconds = alternate(
        {
            "product": lambda: torch.matmul(left, right, out=product),
            "copy": lambda: target.copy_(source),
            "from pinned memory": lambda: target.copy_(pinned, non_blocking=True),
            "to pinned memory": lambda: pinned.copy_(source, non_blocking=True),
            "from pageable memory": lambda: target.copy_(pageable),
        },
        turns,
    )
    median = {name: statistics.median(of) for name, of in seconds.items()}
    rates = {name: nbytes / of for name, of in median.items() if name != "product"}
    return {
        "device": device_name(),
        "devices": device.accelerators(),
        "memory_bytes": device.memory_info().total,
        "product_flops": 2 * size**3 / median["product"],
        # A copy reads and writes every byte.
        "memory_bandwidth": 2 * rates.pop("copy"),
        "host_bytes_per_second": rates,
    }


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """`main` with the arguments of the command line."""
    return main(*map(int, arguments))


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:])))
