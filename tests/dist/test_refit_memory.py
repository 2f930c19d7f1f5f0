"""A refit's extra memory, as the operating system counts it, stays within the promised bound."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.dist.mailbox import WAIT_S
from tests.dist.refits import LAYOUTS, serving
from tests.ranks import RankPool

MIB = 2**20
SIZES = {"layers": 8, "hidden": 256, "heads": 8, "groups": 4, "ffn": 1024, "vocab": 8192}
BUCKET = 4 * MIB
# Python's objects, pages of the sockets' and the allocator's: less than a bucket, which would be
# seen.
SLACK = 7 * MIB // 2
REFITS = 4


def peak_of_a_refit(path: Path, cfg: dict[str, int], addresses: dict[int, str]) -> dict[str, int]:
    with serving(path, cfg, refit_bucket_bytes=BUCKET, refit_timeout_s=WAIT_S) as policy:
        transport = IpcStream(addresses, buffer_bytes=BUCKET)
        policy.refit(transport)  # plans, groups and the pages of code are there
        extras = []
        for _ in range(REFITS - 1):
            with _watched() as samples:
                policy.refit(transport)
            extras.append(max(samples) - samples[0])
        plan = policy.exporter.plan()
        return {
            # What a refit takes it takes every time; what else the process does comes and goes.
            "extra": min(extras),
            "bound": 2 * BUCKET + plan.largest_bytes,
            "weights": plan.total_bytes,
        }


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Bytes of this process that belong to no file, before, during and after the body."""
    samples, done = [_own_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            samples.append(_own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        done.set()
        watcher.join()


def _own_bytes() -> int:
    """Also those that the system has moved to its swap space, since they come back."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    fields = {line[0]: line[1] for line in lines if len(line) > 1}
    return 1024 * sum(int(fields[name]) for name in ("RssAnon:", "RssShmem:", "VmSwap:"))


def play(world: int, path: Path, cfg: dict[str, int], box: Path) -> dict[str, int]:
    """The ranks send; the one after them holds an engine that keeps nothing."""
    address = f"ipc://{box}/engine"
    if int(os.environ["RANK"]) < world:
        os.environ["WORLD_SIZE"] = str(world)
        return peak_of_a_refit(path, cfg, {0: address})
    receiver = Receiver(lambda weights: None, timeout_s=WAIT_S, staged=False)
    for _ in range(REFITS):
        receiver.receive_ipc_stream(address)
    return {}


@pytest.mark.parametrize("layout", ["one", "tp2", "tp2 pp2"])
def test_a_refit_takes_two_buckets_and_the_largest_tensor_at_most(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, layout: str
) -> None:
    world, cfg = LAYOUTS[layout]
    path = checkpoint("qwen2", **SIZES)
    ranks.end()  # new processes: what the tests before left in the allocator is not measured
    *found, _ = ranks.run(world + 1, play, world, path, cfg, tmp_path)
    for result in found:
        assert result["weights"] > 2 * (result["bound"] + SLACK), "or all would fit"
        assert result["extra"] <= result["bound"] + SLACK
    assert max(result["extra"] for result in found) > BUCKET / 2, "what was looked for was seen"
