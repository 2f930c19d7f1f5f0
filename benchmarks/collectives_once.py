"""One rank that exports and counts: `python -m benchmarks.collectives_once CHECKPOINT TP PP`.

Counts every collective call of a process group, whoever makes it, through torch.distributed or
directly.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from benchmarks.export_once import export, flat_buffer, policy_on, verify
from megatron_policy.refit.exporter import Exporter

COLLECTIVES = (
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_anysource",
)
# A torch.distributed group delegates to a backend; private groups are backends themselves.
_GROUPS = {"torch.distributed": dist.ProcessGroup, "private groups": Backend}


def main(path: Path, tp: int, pp: int) -> dict[str, Any]:
    """Calls of a first and a second export, and of the agreement that ends a refit."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    policy = policy_on(path, sizes)
    try:
        return _count(policy.exporter, path)
    finally:
        policy.shutdown()


def _count(exporter: Exporter, path: Path) -> dict[str, Any]:
    target = flat_buffer(path)
    counts: dict[str, Counter[str]] = {}
    for turn in ("first", "again"):
        target.memory.fill_(1)
        with counted() as counts[turn]:
            placed = export(exporter, target)
        verify(path, placed)
    with counted() as counts["agreement"]:
        exporter.agree(None)
    said = exporter.ranks.calls
    if said != sum(count["private groups"] for count in counts.values()):
        raise RuntimeError(f"the exporter says that it made {said} calls, made were {counts}")
    return {"tensors": len(placed), "calls": counts}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collective calls within this context, by kind of group."""
    calls: Counter[str] = Counter()
    # From the class dict: looking a method up would lose its descriptor.
    found = [
        (whose, group, name, vars(group)[name])
        for whose, group in _GROUPS.items()
        for name in COLLECTIVES
        if name in vars(group)
    ]
    for whose, group, name, _ in found:
        setattr(group, name, _counting(calls, whose, getattr(group, name)))
    try:
        yield calls
    finally:
        for _, group, name, method in found:
            setattr(group, name, method)


def _counting(calls: Counter[str], whose: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[whose] += 1
        return method(*args, **kwargs)

    return call


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
