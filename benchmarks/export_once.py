"""Exports of one policy: `python -m benchmarks.export_once PROGRAM CHECKPOINT TURNS`.

Prints the CPU seconds of every turn. Whole tensors go one after another into a buffer whose pages
are in use, along the path that every transport takes. Python's imports and loading are not part of
the time.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.floor import hf_views
from megatron_policy.converters.formats.hf_names import SINGLE
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.buffers import Buffer, BufferSlice, align
from megatron_policy.refit.exporter import Exporter
from megatron_policy.refit.plan import RefitTensor

Placed = list[tuple[RefitTensor, BufferSlice]]


def over_memcpy(path: Path, turns: int) -> dict[str, Any]:
    """Alternate exports with copies of as many bytes in one piece."""
    return beside_memcpy(policy_on(path, {}).exporter, path, turns)


def beside_memcpy(exporter: Exporter, path: Path, turns: int) -> dict[str, Any]:
    """CPU seconds of exports of the checkpoint `path`, and of copies by turns."""
    target = flat_buffer(path)
    seconds: dict[str, list[float]] = {"copy_": [], "memmove": [], "first": [], "ours": []}
    placed = timed(seconds["first"], lambda: export(exporter, target))
    verify(path, placed)
    total = sum(tensor.nbytes for tensor, _ in placed)
    source = torch.empty(total, dtype=torch.uint8).fill_(1)
    same = target.memory[:total]
    for _ in range(turns):
        timed(seconds["copy_"], lambda: same.copy_(source))
        timed(seconds["memmove"], lambda: ctypes.memmove(same.data_ptr(), source.data_ptr(), total))
        target.memory[total:].fill_(1)
        placed = timed(seconds["ours"], lambda: export(exporter, target))
    verify(path, placed)
    return {"tensors": len(placed), "bytes": total, "cpu_s": seconds}


def over_copies(path: Path, turns: int) -> dict[str, Any]:
    """Alternate exports with the same copies between prepared views."""
    policy = policy_on(path, {})
    target = flat_buffer(path)
    seconds: dict[str, list[float]] = {"a loop": [], "one call": [], "first": [], "ours": []}
    placed = timed(seconds["first"], lambda: export(policy.exporter, target))
    verify(path, placed)
    sources, places = _ready(policy, path, placed)
    programs: dict[str, Callable[[], Any]] = {
        "a loop": lambda: _copy_each(sources, places),
        "one call": lambda: torch._foreach_copy_(places, sources),
        "ours": lambda: export(policy.exporter, target),
    }
    for _ in range(turns):
        for name, program in programs.items():
            target.memory.fill_(1)
            timed(seconds[name], program)
            verify(path, placed)
    return {"tensors": len(placed), "cpu_s": seconds}


def export(exporter: Exporter, target: Buffer) -> Placed:
    """Export all tensors, one after another, into `target`."""
    end = 0

    def place(tensor: RefitTensor) -> BufferSlice:
        nonlocal end
        start, end = end, end + align(tensor.nbytes)
        return BufferSlice(target, start)

    return list(exporter.stream(exporter.plan(), place))


def flat_buffer(path: Path) -> Buffer:
    """Aligned room for the checkpoint, in pages that are in use."""
    with safe_open(path / SINGLE, framework="pt") as file:
        sizes = [align(file.get_tensor(name).nbytes) for name in file.keys()]  # noqa: SIM118
    return Buffer(torch.empty(sum(sizes), dtype=torch.uint8).fill_(1))


def verify(path: Path, placed: Placed) -> None:
    """RuntimeError unless the slices hold the checkpoint: each tensor once, bit for bit."""
    with safe_open(path / SINGLE, framework="pt") as file:
        unseen = set(file.keys())
        for tensor, room in placed:
            unseen.remove(tensor.name)
            found = room.tensor(tensor.shape, tensor.dtype)
            if not torch.equal(found, file.get_tensor(tensor.name)):
                raise RuntimeError(f"{tensor.name} was not exported faithfully")
    if unseen:
        raise RuntimeError(f"not exported: {sorted(unseen)}")


def timed(seconds: list[float], step: Callable[[], Any]) -> Any:
    """Return the result of `step`, and add its CPU seconds to `seconds`."""
    started = time.process_time()
    result = step()
    seconds.append(time.process_time() - started)
    return result


def policy_on(path: Path, megatron: Mapping[str, int]) -> MegatronPolicy:
    """A policy for inference only, in bf16."""
    config = {
        "model_name": str(path),
        "precision": "bfloat16",
        "train_global_batch_size": 1,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": 128,
        "megatron_cfg": {"enabled": True, **megatron},
    }
    return MegatronPolicy(config, init_optimizer=False, init_reference_model=False, timeout_s=60.0)


def _ready(
    policy: MegatronPolicy, path: Path, placed: Placed
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    views = dict(hf_views(weights, config))
    sources = [views[tensor.name] for tensor, _ in placed]
    places = [
        room.tensor(tensor.shape, tensor.dtype).view(source.shape)
        for (tensor, room), source in zip(placed, sources, strict=True)
    ]
    return sources, places


def _copy_each(sources: list[torch.Tensor], places: list[torch.Tensor]) -> None:
    for source, place in zip(sources, places, strict=True):
        place.copy_(source)


if __name__ == "__main__":
    program = {"over memcpy": over_memcpy, "over copies": over_copies}[sys.argv[1]]
    print(json.dumps(program(Path(sys.argv[2]), int(sys.argv[3]))))
