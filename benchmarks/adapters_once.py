"""One rank that hands its adapters over and counts the bytes that ranks exchange meanwhile:
`python -m benchmarks.adapters_once CHECKPOINT TP PP`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

from benchmarks.collectives_once import COLLECTIVES
from benchmarks.export_once import policy_on
from megatron_policy.refit.exporter import stream_tensors

PEFT = {"enabled": True, "dim": 16, "alpha": 32, "lora_B_init_method": "normal"}


def main(path: Path, tp: int, pp: int) -> dict[str, Any]:
    """Bytes of the adapters, of what collectives delivered to this rank, and of the whole model."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "peft": PEFT}
    policy = policy_on(path, sizes)
    try:
        exporter = policy.exporter.select(adapters=True)
        plan = exporter.plan()
        with counted_bytes() as found:
            handed_over = {name: tensor.nbytes for name, tensor in stream_tensors(exporter, plan)}
        if not handed_over or any(".lora_" not in name for name in handed_over):
            raise RuntimeError(f"other tensors than adapters were handed over: {set(handed_over)}")
        whole = policy.exporter.plan().total_bytes
        return {"adapters": sum(handed_over.values()), "moved": sum(found), "whole": whole}
    finally:
        policy.shutdown()


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The bytes of each collective's first tensor, which receives, within this context."""
    found: list[int] = []
    methods = {name: vars(Backend)[name] for name in COLLECTIVES if name in vars(Backend)}

    def counting(method: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            first = args[0][0] if isinstance(args[0], list) else args[0]
            if isinstance(first, torch.Tensor):
                found.append(first.nbytes)
            return method(self, *args, **kwargs)

        return call

    for name in methods:
        setattr(Backend, name, counting(getattr(Backend, name)))
    try:
        yield found
    finally:
        for name, method in methods.items():
            setattr(Backend, name, method)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
